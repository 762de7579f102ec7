//! What every kernel relies on, tried once on each device that is opened: a driver that computes wrongly is refused by name.

use std::sync::Arc;

use meganeura_codegen::profile::MatrixUnit;
use meganeura_codegen::program::{Access, Space};
use meganeura_ir::{DType, Tensor, TensorType};

use crate::assemble::Assembler;
use crate::device::Device;
use crate::parameters::ParameterStore;
use crate::session::{Session, SessionError};

/// One thing that was tried on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub name: &'static str,
    /// Whether the results were right, to the bit.
    pub passed: bool,
}

/// Invocations of each probe: one workgroup.
const LANES: u32 = 64;

/// A kernel over two buffers, words in and words out, with the results that it must give.
struct Case {
    name: &'static str,
    /// Declarations and body; `i` is the lane, `b0` the operand, `b1` the result.
    types: [&'static str; 2],
    globals: &'static str,
    body: &'static str,
    operand: fn(u32) -> u32,
    expected: fn(u32) -> u32,
}

const CASES: &[Case] = &[
    Case {
        name: "f32 arithmetic",
        types: ["f32", "f32"],
        globals: "",
        body: "b1[i] = (b0[i] * 1.5 - 0.25) * 2.0 + floor(b0[i] * 0.5);",
        operand: |i| (i as f32).to_bits(),
        expected: |i| {
            let x = i as f32;
            ((x * 1.5 - 0.25) * 2.0 + (x * 0.5).floor()).to_bits()
        },
    },
    Case {
        name: "i32 arithmetic",
        types: ["i32", "i32"],
        globals: "",
        body: "let x = b0[i]; b1[i] = (x / 7) * 1000 + (x % 7) + (x >> 3u) - x * 715827883;",
        operand: |i| (i as i32 * 37 - 900) as u32,
        expected: |i| {
            let x = i as i32 * 37 - 900;
            ((x / 7) * 1000 + (x % 7) + (x >> 3)).wrapping_sub(x.wrapping_mul(715827883)) as u32
        },
    },
    Case {
        name: "u32 arithmetic",
        types: ["u32", "u32"],
        globals: "",
        body: "let x = b0[i]; b1[i] = (x * 2654435761u) ^ (x >> 5u) ^ select(0u, 1u, x > 0x80000000u);",
        operand: |i| i.wrapping_mul(0x9e37_79b9),
        expected: |i| {
            let x = i.wrapping_mul(0x9e37_79b9);
            x.wrapping_mul(2654435761) ^ (x >> 5) ^ u32::from(x > 0x8000_0000)
        },
    },
    Case {
        name: "exact integer division",
        types: ["u32", "u32"],
        globals: "",
        body: "var wrong = 0u;
            for (var d = 1u; d < 130u; d += 1u) {
                let n = b0[i] * d;
                if (n / d != b0[i]) { wrong += 1u; }
                if ((n + d - 1u) / d != b0[i]) { wrong += 1u; }
                if ((n + d - 1u) % d != d - 1u) { wrong += 1u; }
            }
            b1[i] = wrong * 1000000u + b0[i] / 41u;",
        operand: |i| i * 11527 + 23,
        expected: |i| (i * 11527 + 23) / 41,
    },
    Case {
        name: "workgroup memory and barriers",
        types: ["u32", "u32"],
        globals: "var<workgroup> shared_words: array<u32, 64>;",
        body: "shared_words[i] = b0[i];
            for (var half = 32u; half > 0u; half /= 2u) {
                workgroupBarrier();
                if (i < half) { shared_words[i] += shared_words[i + half]; }
            }
            workgroupBarrier();
            b1[i] = shared_words[0] + b0[63u - i];",
        operand: |i| i * i,
        expected: |i| (0..LANES).map(|j| j * j).sum::<u32>() + (LANES - 1 - i).pow(2),
    },
    Case {
        name: "NaN recognised by its bits",
        types: ["f32", "u32"],
        globals: "",
        body: "b1[i] = select(0u, 1u, (bitcast<u32>(b0[i]) & 0x7fffffffu) > 0x7f800000u);",
        operand: |i| {
            [0x7fc0_0000, 0xffc0_0001, 0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 0, 0x8000_0000, 0x3f80_0000][i as usize % 8]
        },
        expected: |i| u32::from(i % 8 < 2),
    },
];

/// Updates a buffer in place, twice, with a barrier between.
const IN_PLACE: &str = "in-place updates";

/// Runs every probe on `device`.
pub fn run(device: &Arc<Device>) -> Result<Vec<Probe>, SessionError> {
    let mut a = Assembler::new();
    let words = TensorType::new(DType::U32, [LANES as usize]);
    let access = [Access::Read, Access::ReadWrite];
    for case in CASES {
        let operand = a.constant((0..LANES).map(case.operand).collect());
        let result = a.output(case.name, words.clone());
        let [from, to] = case.types;
        let wgsl = format!(
            "@group(0) @binding(0) var<storage, read> b0: array<{from}>;
            @group(0) @binding(1) var<storage, read_write> b1: array<{to}>;
            {}
            @compute @workgroup_size({LANES})
            fn main(@builtin(local_invocation_index) i: u32) {{ {} }}",
            case.globals, case.body
        );
        let kernel = a.kernel(case.name, &wgsl, [LANES, 1, 1], &access);
        a.dispatch(kernel, &[operand, result], [1, 1, 1], false);
    }
    let counter = a.region(Space::Outputs, u64::from(LANES) * 4);
    a.output_at(IN_PLACE, words.clone(), Some(counter));
    let kernel = |store: &str| {
        format!(
            "@group(0) @binding(0) var<storage, read_write> b0: array<u32>;
            @compute @workgroup_size({LANES})
            fn main(@builtin(local_invocation_index) i: u32) {{ b0[i] = {store}; }}"
        )
    };
    let start = a.kernel("start", &kernel("i"), [LANES, 1, 1], &[Access::ReadWrite]);
    let step = a.kernel(IN_PLACE, &kernel("b0[i] * 3u + 1u"), [LANES, 1, 1], &[Access::ReadWrite]);
    for (kernel, barrier) in [(start, false), (step, true), (step, true)] {
        a.dispatch(kernel, &[counter], [1, 1, 1], barrier);
    }

    let program = Arc::new(a.finish());
    let store = ParameterStore::new(device, &program)?;
    let outputs = Session::new(device, program, &store)?.run(&[])?;
    let in_place: fn(u32) -> u32 = |i| 9 * i + 4;
    let expected = CASES.iter().map(|case| (case.name, case.expected)).chain([(IN_PLACE, in_place)]);
    let probes = expected.zip(&outputs).map(|((name, value), output)| {
        let words: Vec<i64> = (0..LANES).map(|i| value(i).into()).collect();
        Probe { name, passed: output.to_i64_vec() == words }
    });
    Ok(probes.collect())
}

/// f16 values in memory that some arithmetic loses: subnormal, negative zero, the largest, infinite.
const HALVES: [u16; 8] = [0x0001, 0x8001, 0x03ff, 0x8000, 0x7bff, 0xfc00, 0x3c01, 0xb555];

/// Multiplies and adds matrices of f16 that are not symmetric, in both layouts, with results that f16 cannot hold; and takes f16 values
/// from memory to f32 and back, one by one and as vectors.
pub(crate) fn run_matrix_unit(device: &Arc<Device>, unit: MatrixUnit) -> Result<Probe, SessionError> {
    const SIDE: u32 = 16;
    let wgsl = format!(
        "enable f16;
        enable wgpu_cooperative_matrix;
        @group(0) @binding(0) var<storage, read_write> b0: array<u32>;
        var<workgroup> left: array<f16, 256>;
        var<workgroup> right: array<f16, 256>;
        var<workgroup> sums: array<f32, 256>;
        @compute @workgroup_size({0})
        fn main(@builtin(local_invocation_index) lane: u32) {{
            for (var i = lane; i < 256u; i += {0}u) {{
                left[i] = f16(i % 16u * 3u + i / 16u);
                right[i] = f16(f32(i % 16u) * 2.0 - f32(i / 16u) * 5.0);
                sums[i] = f32(i) * 0.5;
            }}
            workgroupBarrier();
            let first = 0;
            var c = coopLoadT<coop_mat16x16<f32, C>>(&sums[first], 16u);
            let a = coopLoadT<coop_mat16x16<f16, A>>(&left[first], 16u);
            let b = coopLoad<coop_mat16x16<f16, B>>(&right[first], 16u);
            c = coopMultiplyAdd(a, b, c);
            c = c * 4.0;
            workgroupBarrier();
            coopStoreT(c, &sums[first], 16u);
            workgroupBarrier();
            for (var i = lane; i < 256u; i += {0}u) {{ b0[i] = bitcast<u32>(sums[i]); }}
        }}",
        unit.subgroup
    );
    let name = "f16 matrix units";
    let mut a = Assembler::new();
    let result = a.output(name, TensorType::new(DType::U32, [(SIDE * SIDE) as usize]));
    let kernel = a.kernel(name, &wgsl, [unit.subgroup, 1, 1], &[Access::ReadWrite]);
    a.dispatch(kernel, &[result], [1, 1, 1], false);
    let pairs = |halves: [u16; 8]| [0, 2, 4, 6].map(|i| u32::from(halves[i + 1]) << 16 | u32::from(halves[i]));
    let halves = a.constant(pairs(HALVES).to_vec());
    for (name, element, body) in [
        ("f16 in memory", "f16", "b1[lane] = f16(f32(b0[lane ^ 1u]));"),
        ("vectors of f16 in memory", "vec4<f16>", "if lane < 2u { b1[lane ^ 1u] = vec4<f16>(vec4<f32>(b0[lane])); }"),
    ] {
        let wgsl = format!(
            "enable f16;
            @group(0) @binding(0) var<storage, read> b0: array<{element}>;
            @group(0) @binding(1) var<storage, read_write> b1: array<{element}>;
            @compute @workgroup_size(8)
            fn main(@builtin(local_invocation_index) lane: u32) {{ {body} }}"
        );
        let result = a.output(name, TensorType::new(DType::U32, [4]));
        let kernel = a.kernel(name, &wgsl, [8, 1, 1], &[Access::Read, Access::ReadWrite]);
        a.dispatch(kernel, &[halves, result], [1, 1, 1], false);
    }
    let program = Arc::new(a.finish());
    let store = ParameterStore::new(device, &program)?;
    let outputs = Session::new(device, program, &store)?.run(&[])?;
    let expected = |i: u32| -> i64 {
        let (row, column) = (i / SIDE, i % SIDE);
        let left = |k: u32| (k * 3 + row) as f32;
        let right = |k: u32| k as f32 * 2.0 - column as f32 * 5.0;
        let sum = (0..SIDE).fold(i as f32 * 0.5, |sum, k| sum + left(k) * right(k));
        (sum * 4.0).to_bits().into()
    };
    let words = |words: [u32; 4]| words.map(i64::from).to_vec();
    let products: Vec<i64> = (0..SIDE * SIDE).map(expected).collect();
    let [h0, h1, h2, h3, h4, h5, h6, h7] = HALVES;
    let (neighbours, vectors) = ([h1, h0, h3, h2, h5, h4, h7, h6], [h4, h5, h6, h7, h0, h1, h2, h3]);
    let right = [products, words(pairs(neighbours)), words(pairs(vectors))];
    Ok(Probe { name, passed: outputs.iter().map(Tensor::to_i64_vec).eq(right) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::device;

    #[test]
    fn an_open_device_has_passed_every_probe() {
        let probes = device().probes();
        assert_eq!(probes.len(), CASES.len() + 1);
        assert!(probes.iter().all(|p| p.passed), "{probes:?}");
    }
}
