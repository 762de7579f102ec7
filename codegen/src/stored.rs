//! A compiled program as bytes, to be read again by the code that wrote it.
//!
//! Only what the compiler found is stored. Names and types are those of the graph that the reader has.

use meganeura_ir::{InputInfo, OutputInfo, ParameterId, ParameterInfo, Verified};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::program::{Binding, ConstantData, Dispatch, Kernel, Memory, ParameterBinding, Program, Region};
use crate::{CompileReport, Compiled, PlanKey};

const MAGIC: &[u8] = b"meganeura plan 1\n";
const HASH: usize = 32;

/// Why bytes are not the plan that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoredError {
    #[error("it is not a plan of this version")]
    Format,
    #[error("it is the plan of something else")]
    Key,
    #[error("it is damaged")]
    Damaged,
    #[error("a plan cannot be written: {0}")]
    Write(String),
}

#[derive(Serialize, Deserialize)]
struct Stored {
    kernels: Vec<Kernel>,
    dispatches: Vec<Dispatch>,
    memory: Memory,
    inputs: Vec<Option<Region>>,
    outputs: Vec<Option<Region>>,
    /// With whether a run replaces the value.
    parameters: Vec<(Option<Region>, bool)>,
    constants: Vec<ConstantData>,
    stores_halves: bool,
    report: CompileReport,
}

/// The bytes of what `key` stands for: a mark, the key, a checksum, and the plan.
pub fn to_bytes(compiled: &Compiled, key: &PlanKey) -> Result<Vec<u8>, StoredError> {
    let Program { kernels, dispatches, memory, inputs, outputs, parameters, constants, stores_halves } = compiled.program.clone();
    let regions = |bindings: Vec<Binding>| bindings.into_iter().map(|binding| binding.region).collect();
    let stored = Stored {
        kernels,
        dispatches,
        memory,
        inputs: regions(inputs),
        outputs: regions(outputs),
        parameters: parameters.into_iter().map(|p| (p.region, p.updated)).collect(),
        constants,
        stores_halves,
        report: compiled.report.clone(),
    };
    let plan = postcard::to_allocvec(&stored).map_err(|e| StoredError::Write(e.to_string()))?;
    Ok([MAGIC, key.bytes(), &checksum(&plan), &plan].concat())
}

/// What [`to_bytes`] wrote for `key`, which must be that of `graph`.
pub fn from_bytes(bytes: &[u8], key: &PlanKey, graph: &Verified) -> Result<Compiled, StoredError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(StoredError::Format)?;
    let (found, rest) = rest.split_first_chunk::<HASH>().ok_or(StoredError::Damaged)?;
    if found != key.bytes() {
        return Err(StoredError::Key);
    }
    let (sum, plan) = rest.split_first_chunk::<HASH>().ok_or(StoredError::Damaged)?;
    if *sum != checksum(plan) {
        return Err(StoredError::Damaged);
    }
    let stored: Stored = postcard::from_bytes(plan).map_err(|_| StoredError::Damaged)?;
    let Stored { kernels, dispatches, memory, inputs, outputs, parameters, constants, stores_halves, report } = stored;
    let counts = [inputs.len(), outputs.len(), parameters.len()];
    if counts != [graph.inputs().len(), graph.outputs().len(), graph.parameters().len()] {
        return Err(StoredError::Damaged);
    }
    let input = |(InputInfo { name, ty }, region): (&InputInfo, _)| Binding { name: name.clone(), ty: ty.clone(), region };
    let output = |(OutputInfo { name, node }, region): (&OutputInfo, _)| {
        let ty = graph.ty(*node).clone();
        Binding { name: name.clone(), ty, region }
    };
    let parameter = |(index, (info, (region, updated))): (usize, (&ParameterInfo, (Option<Region>, bool)))| {
        let id = ParameterId(index as u32);
        ParameterBinding { id, name: info.name.clone(), ty: info.ty.clone(), region, updated }
    };
    let program = Program {
        kernels,
        dispatches,
        memory,
        inputs: graph.inputs().iter().zip(inputs).map(input).collect(),
        outputs: graph.outputs().iter().zip(outputs).map(output).collect(),
        parameters: graph.parameters().iter().zip(parameters).enumerate().map(parameter).collect(),
        constants,
        stores_halves,
    };
    Ok(Compiled { program, report, stages: Vec::new() })
}

fn checksum(plan: &[u8]) -> [u8; HASH] {
    Sha256::digest(plan).into()
}

#[cfg(test)]
mod tests {
    use meganeura_ir::testing::sample_graphs;

    use super::*;
    use crate::{CompileOptions, DeviceProfile, compile};

    #[test]
    fn every_sample_survives_and_no_damage_goes_unnoticed() {
        let (profile, options) = (DeviceProfile::generic(), CompileOptions::default());
        let samples = sample_graphs();
        for sample in &samples {
            let graph = sample.1.clone().verify().unwrap();
            let key = PlanKey::new(&graph, &profile, &options);
            let Ok(compiled) = compile(&graph, &profile, &options) else { continue };
            let bytes = to_bytes(&compiled, &key).unwrap();
            let read = from_bytes(&bytes, &key, &graph).unwrap();
            assert_eq!(read.program, compiled.program);
            assert_eq!(read.report, compiled.report);
            for length in [0, 5, MAGIC.len() + 3, bytes.len() / 2, bytes.len() - 1] {
                assert!(from_bytes(&bytes[..length], &key, &graph).is_err());
            }
            for at in (0..bytes.len()).step_by(997).chain([bytes.len() - 1]) {
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x10;
                assert!(from_bytes(&damaged, &key, &graph).is_err(), "byte {at}");
            }
            let foreign = PlanKey::new(&graph, &DeviceProfile::software(), &options);
            assert_eq!(from_bytes(&bytes, &foreign, &graph).unwrap_err(), StoredError::Key);
        }
    }
}
