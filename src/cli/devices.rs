//! `meganeura devices`: what this machine can compute on.

use clap::Args;
use meganeura::runtime::DeviceInfo;
use meganeura::{Device, DeviceSelector, Error};
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
    let tested: Vec<(DeviceInfo, Vec<(&'static str, bool)>, Result<(), String>)> = devices.into_iter().map(self_test).collect();
    if args.json {
        let list: Value = tested.iter().map(|(info, probes, verdict)| describe(info, probes, verdict)).collect();
        return print_json(&list);
    }
    let text: Vec<String> = tested.iter().map(|(info, probes, verdict)| summarise(info, probes, verdict)).collect();
    print(&text.join("\n"))
}

/// Opens a device, which runs its self-test. The verdict is why it cannot be used.
fn self_test(info: DeviceInfo) -> (DeviceInfo, Vec<(&'static str, bool)>, Result<(), String>) {
    if let Some(reason) = info.unsupported.clone() {
        return (info, Vec::new(), Err(reason));
    }
    match Device::open(&DeviceSelector::Index(info.index)) {
        Ok(device) => {
            let probes = device.probes().iter().map(|probe| (probe.name, probe.passed)).collect();
            (info, probes, Ok(()))
        }
        Err(e) => (info, Vec::new(), Err(e.to_string())),
    }
}

fn describe(info: &DeviceInfo, probes: &[(&'static str, bool)], verdict: &Result<(), String>) -> Value {
    let limits = &info.limits;
    let probes: serde_json::Map<String, Value> = probes.iter().map(|(name, passed)| (name.to_string(), json!(passed))).collect();
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
        "usable": verdict.is_ok(),
        "reason": verdict.as_ref().err(),
        "self_test": probes,
    })
}

fn summarise(info: &DeviceInfo, probes: &[(&'static str, bool)], verdict: &Result<(), String>) -> String {
    let limits = &info.limits;
    let mebibytes = |bytes: u64| format!("{} MiB", bytes >> 20);
    let passed = probes.iter().filter(|(_, passed)| *passed).count();
    let verdict = match verdict {
        Ok(()) => format!("usable, self-test {passed} of {} passed", probes.len()),
        Err(reason) => format!("not usable: {reason}"),
    };
    format!(
        "{}: {} ({})\n  driver      {} {}\n  memory      {}, allocations to {}\n  bindings    {} of {}\n  workgroups  {} invocations, {} KiB shared\n  status      {verdict}\n",
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
    )
}
