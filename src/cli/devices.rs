//! `meganeura devices`: what this machine can compute on.

use clap::Args;
use meganeura::runtime::DeviceInfo;
use meganeura::{Device, DeviceSelector, Error, Precision};
use serde_json::{Value, json};

use super::{Failure, print, print_json};

/// List adapters, drivers and limits, and what their self-test says
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  meganeura devices --json")]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let devices = Device::list().map_err(Error::from)?;
    let tested: Vec<Tested> = devices.into_iter().map(Tested::new).collect();
    if args.json {
        return print_json(&tested.iter().map(Tested::json).collect());
    }
    print(&tested.iter().map(Tested::text).collect::<Vec<_>>().join("\n"))
}

/// An adapter and what its self-test said.
struct Tested {
    info: DeviceInfo,
    /// Name and outcome of each probe.
    probes: Vec<(&'static str, bool)>,
    /// Why it cannot be used.
    refusal: Option<String>,
}

impl Tested {
    /// Opens the device, which runs its self-test.
    fn new(info: DeviceInfo) -> Self {
        let opened = match &info.unsupported {
            Some(reason) => Err(reason.clone()),
            None => Device::open_at(&DeviceSelector::Index(info.index), Precision::Accelerated).map_err(|e| e.to_string()),
        };
        match opened {
            Ok(device) => {
                let probes = device.probes().iter().map(|probe| (probe.name, probe.passed)).collect();
                Tested { info, probes, refusal: None }
            }
            Err(reason) => Tested { info, probes: Vec::new(), refusal: Some(reason) },
        }
    }

    fn json(&self) -> Value {
        let Tested { info, probes, refusal } = self;
        let limits = &info.limits;
        let probes: serde_json::Map<String, Value> =
            probes.iter().map(|(name, passed)| (name.to_string(), json!(passed))).collect();
        json!({
            "index": info.index,
            "name": info.name,
            "kind": info.kind.to_string(),
            "driver": info.driver,
            "driver_info": info.driver_info,
            "memory_bytes": limits.memory_bytes,
            "allocation_bytes": limits.allocation_bytes,
            "storage_binding_bytes": limits.storage_binding_bytes,
            "storage_bindings": limits.storage_bindings,
            "workgroup_bytes": limits.workgroup_bytes,
            "workgroup_invocations": limits.workgroup_invocations,
            "workgroups": limits.workgroups,
            "matrix_unit": info.matrix_unit.is_some(),
            "usable": refusal.is_none(),
            "reason": refusal,
            "self_test": probes,
        })
    }

    fn text(&self) -> String {
        let Tested { info, probes, refusal } = self;
        let limits = &info.limits;
        let mebibytes = |bytes: u64| format!("{} MiB", bytes >> 20);
        let passed = probes.iter().filter(|(_, passed)| *passed).count();
        let verdict = match refusal {
            None => format!("usable, self-test {passed} of {} passed", probes.len()),
            Some(reason) => format!("not usable: {reason}"),
        };
        format!(
            "{}: {} ({})\n  driver      {} {}\n  memory      {}, allocations to {}\n  bindings    {} of {}\n  workgroups  {} invocations, {} KiB shared\n  matrices    {}\n  status      {verdict}\n",
            info.index,
            info.name,
            info.kind,
            info.driver,
            info.driver_info,
            mebibytes(limits.memory_bytes),
            mebibytes(limits.allocation_bytes),
            limits.storage_bindings,
            mebibytes(limits.storage_binding_bytes),
            limits.workgroup_invocations,
            limits.workgroup_bytes >> 10,
            if info.matrix_unit.is_some() { "f16 units, for --precision accelerated" } else { "no f16 units" },
        )
    }
}
