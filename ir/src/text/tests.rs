use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::testing::sample_graphs;
use crate::{Composite, DType, NodeId, Op, ParameterInfo, Real, Shape, SliceDim, Tensor};

fn assert_same(a: &Graph, b: &Graph) {
    assert_eq!(a.nodes(), b.nodes());
    assert_eq!(a.inputs(), b.inputs());
    assert_eq!(a.parameters(), b.parameters());
    assert_eq!(a.outputs(), b.outputs());
    assert_eq!(a.updates(), b.updates());
}

fn assert_round_trip(g: &Graph) {
    let text = print(g);
    let parsed = parse(&text).unwrap_or_else(|e| panic!("{e} in\n{text}"));
    assert_same(g, &parsed);
    assert_eq!(print(&parsed), text);
}

fn constant(tensor: Tensor) -> (Graph, String) {
    let mut g = Graph::new();
    g.constant(tensor).unwrap();
    let text = print(&g);
    (g, text)
}

const TRAINING_STEP: &str = r#"input "x" : f32[8,10]
parameter "fc.weight" : f32[10,10] {stored=f16, role=weight}
parameter "mean" : f32[10] {stored=f32, role=statistic}
parameter "adam.m/fc.weight" : f32[10,10] {stored=f32, role=optimizer}
%0 = input "x" : f32[8,10]
%1 = parameter "fc.weight" : f32[10,10]
%2 = dot %0 %1 {contract=[1]x[1]} : f32[8,10]
%3 = constant {values=[0.5]} : f32[]
%4 = broadcast %3 {axes=[]} : f32[10,10]
%5 = mul %1 %4 : f32[10,10]
%6 = softmax %2 {axis=1} : f32[8,10]
%7 = slice %6 {start=[7,0], step=[-1,3], size=[8,4]} : f32[8,4]
%8 = max_pool %6 {size=[2], stride=[2], dilation=[1], pads=[1:-1]} : f32[8,5]
output "y" = %6
output "last" = %8
update "fc.weight" = %5
"#;

#[test]
fn a_training_step_reads_as_documented() {
    let g = parse(TRAINING_STEP).unwrap();
    assert_eq!(print(&g), TRAINING_STEP);
    assert_eq!(g.parameters()[0].stored, DType::F16);
    assert_eq!(g.parameters()[2].role, ParameterRole::Optimizer);
    assert_eq!(g.nodes().len(), 9);
    assert_eq!(g.output_node("last"), Some(NodeId(8)));
    assert_eq!(g.updates()[0].node, NodeId(5));
}

#[test]
fn every_sample_prints_and_parses() {
    for (_, g) in sample_graphs() {
        assert_round_trip(&g);
        assert_round_trip(&g.decomposed().unwrap());
    }
}

#[test]
fn declarations_without_nodes_survive() {
    let mut g = Graph::new();
    g.input("dead", TensorType::new(DType::I8, [0, 3])).unwrap();
    let x = g.input("x", TensorType::scalar(DType::F64)).unwrap();
    let info = ParameterInfo {
        name: "w".into(),
        ty: TensorType::new(DType::F32, [7]),
        stored: DType::BF16,
        role: ParameterRole::Weight,
    };
    g.parameter(info).unwrap();
    g.output("y", x).unwrap();
    let live = g.decomposed().unwrap();
    assert_eq!(live.nodes().len(), 1);
    assert_round_trip(&live);
}

#[test]
fn names_of_any_characters_survive() {
    let mut g = Graph::new();
    for name in
        ["", "plain", "a b", "say \"hi\"", "back\\slash", "line\nbreak\r\t\0", "naïve 模型 🦀", "\u{7f}\u{301}", "# %0 = {", "}"]
    {
        let x = g.input(name, TensorType::scalar(DType::F32)).unwrap();
        g.output(name, x).unwrap();
    }
    assert_round_trip(&g);
}

#[test]
fn constants_list_exact_values() {
    let (g, text) = constant(Tensor::from_f32([7], &[0.1, -0.0, 1e-45, f32::MAX, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]));
    assert_eq!(text, "%0 = constant {values=[0.1,-0.0,1e-45,3.4028235e38,NaN,inf,-inf]} : f32[7]\n");
    assert_round_trip(&g);
    let (g, text) =
        constant(Tensor::from_bytes(TensorType::new(DType::U64, [2]), [[0xff; 8], [1, 0, 0, 0, 0, 0, 0, 0]].concat()).unwrap());
    assert_eq!(text, "%0 = constant {values=[18446744073709551615,1]} : u64[2]\n");
    assert_round_trip(&g);
    for dtype in DType::ALL {
        assert_round_trip(&constant(Tensor::from_f64(dtype, [3], &[0.3, 1.0, 100.0])).0);
        assert_round_trip(&constant(Tensor::from_f64(dtype, [0], &[])).0);
        assert_round_trip(&constant(Tensor::from_f64(dtype, [65], &[0.3; 65])).0);
    }
}

#[test]
fn constants_that_no_values_express_are_bytes() {
    let payload = Tensor::from_bytes(TensorType::scalar(DType::F32), vec![1, 0, 0xc0, 0xff]).unwrap();
    let (g, text) = constant(payload);
    assert_eq!(text, "%0 = constant {bytes=0100c0ff} : f32[]\n");
    assert_round_trip(&g);
    let two = Tensor::from_bytes(TensorType::scalar(DType::Bool), vec![2]).unwrap();
    assert_eq!(constant(two.clone()).1, "%0 = constant {bytes=02} : bool[]\n");
    assert_round_trip(&constant(two).0);
    let (_, text) = constant(Tensor::from_i64(DType::U8, [65], &[7; 65]));
    assert_eq!(text, format!("%0 = constant {{bytes={}}} : u8[65]\n", "07".repeat(65)));
}

#[test]
fn real_attributes_keep_their_bits() {
    for bits in [1e-5f64, 0.1, 0.0, -0.0, f64::MIN_POSITIVE, f64::INFINITY, f64::NAN, f64::from_bits(0xfff8_0000_0000_0001)]
        .map(f64::to_bits)
    {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [7])).unwrap();
        let normalize = Composite::Normalize { axes: vec![0], epsilon: Real(f64::from_bits(bits)) };
        g.push(Op::Composite(normalize), &[x]).unwrap();
        assert_round_trip(&g);
    }
}

#[test]
fn extreme_attributes_survive() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [1])).unwrap();
    let slice = Op::Slice(vec![SliceDim { start: 0, step: isize::MIN, size: 1 }]);
    g.push(slice, &[x]).unwrap();
    g.push(Op::Iota { dtype: DType::I8, shape: Shape::from([(1 << 31) - 1]), axis: 0 }, &[]).unwrap();
    assert_round_trip(&g);
}

#[test]
fn comments_and_spaces_mean_nothing() {
    let g = parse(
        "# a graph\r\n\n  input   \"x\":f32[ 2 , 3 ]\n\t%0=input \"x\" :f32[2,3]\n%1 = reduce_sum %0 { axes = [ 0 ] } : f32[3]",
    )
    .unwrap();
    assert_eq!(g.nodes().len(), 2);
}

#[test]
fn errors_name_the_line_and_the_problem() {
    let cases = [
        ("node %0", "line 3: expected a declaration, a node, an output or an update, found \"node %0\""),
        ("input x : f32[]", "line 3: expected a name in double quotes, found \"x : f32[]\""),
        ("input \"x\" : f32[]", "line 3: the name \"x\" is taken"),
        ("input \"y : f32[]", "line 3: expected a name in double quotes, found \"\\\"y : f32[]\""),
        ("input \"y\" : f33[]", "line 3: expected a dtype, found \"f33[]\""),
        ("input \"y\" : f32[-1]", "line 3: expected sizes, found \"[-1]\""),
        ("input \"y\" : f32[2", "line 3: expected ,, found \"\""),
        ("input \"y\" : f32[] junk", "line 3: expected the end of the line, found \"junk\""),
        ("parameter \"w\" : f32[] {stored=f32, role=wheel}", "line 3: expected a role, found \"wheel\""),
        ("parameter \"w\" : f32[] {stored=f32}", "line 3: role is missing"),
        ("%3 = exp %0 : f32[7]", "line 3: the next node is %1"),
        ("%1 = exq %0 : f32[7]", "line 3: no op is called \"exq\""),
        ("%1 = exp %1 : f32[7]", "line 3: operand %1 is not in the graph"),
        ("%1 = exp : f32[7]", "line 3: exp takes 1 operands, found 0"),
        ("%1 = exp %0 : f32[8]", "line 3: the op gives f32[7], not f32[8]"),
        ("%1 = exp %0 {axis=0} : f32[7]", "line 3: the attribute \"axis\" does not belong here"),
        ("%1 = softmax %0 : f32[7]", "line 3: axis is missing"),
        ("%1 = softmax %0 {axis=0, axis=0} : f32[7]", "line 3: the attribute \"axis\" does not belong here"),
        ("%1 = softmax %0 {axis=[0]} : f32[7]", "line 3: the attribute \"axis\" does not belong here"),
        ("%1 = softmax %0 {axis=-1} : f32[7]", "line 3: expected a number that fits, found \"-1\""),
        ("%1 = input \"x\" : f32[7]", "line 3: this is %0 again"),
        ("%1 = input \"z\" : f32[7]", "line 3: no input or parameter is called \"z\""),
        ("%1 = input \"x\" %0 : f32[7]", "line 3: expected :, found \"%0 : f32[7]\""),
        ("%1 = constant {values=[1]} : f32[2]", "line 3: f32[2] needs 8 bytes, found 4"),
        ("%1 = constant {values=[256]} : u8[1]", "line 3: u8[1] has no element \"256\""),
        ("%1 = constant {bytes=0g} : u8[1]", "line 3: expected bytes in hexadecimal, found \"0g\""),
        (
            "%1 = slice %0 {start=[0], step=[], size=[1]} : f32[1]",
            "line 3: expected lists of equal length, found \"step and size: 0 and 1 beside 1\"",
        ),
        ("output \"y\" = %9", "line 3: operand %9 is not in the graph"),
        ("update \"w\" = %0", "line 3: no input or parameter is called \"w\""),
    ];
    for (line, message) in cases {
        let text = format!("input \"x\" : f32[7]\n%0 = input \"x\" : f32[7]\n{line}\n");
        assert_eq!(parse(&text).unwrap_err().to_string(), message, "{line}");
    }
}

/// Printed graphs with all kinds of attributes.
fn printed() -> &'static [String] {
    static PRINTED: std::sync::OnceLock<Vec<String>> = std::sync::OnceLock::new();
    PRINTED.get_or_init(|| {
        let mut g = Graph::new();
        g.push(Op::Constant(Arc::new(Tensor::from_f32([2], &[1.0, f32::NAN]))), &[]).unwrap();
        let samples = sample_graphs().into_iter().map(|(_, g)| print(&g));
        samples.chain([TRAINING_STEP.to_owned(), print(&g)]).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn damaged_graphs_never_panic_and_what_parses_prints(
        which in any::<prop::sample::Index>(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), prop::sample::select(b"0123456789%[]{}:,=x-\"\\u \n".to_vec()), 0..3u8), 1..6),
    ) {
        let mut bytes = which.get(printed()).clone().into_bytes();
        for (at, byte, kind) in edits {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => { bytes.truncate(at.max(1)); }
            }
        }
        if let Ok(g) = parse(&String::from_utf8_lossy(&bytes)) {
            assert_round_trip(&g);
        }
    }

    #[test]
    fn huge_numbers_never_overflow(
        which in any::<prop::sample::Index>(),
        number in prop::sample::select(vec!["2147483648", "4294967295", "9223372036854775807", "-9223372036854775808", "18446744073709551615"]),
        at in any::<prop::sample::Index>(),
    ) {
        let text = which.get(printed());
        let digits: Vec<usize> = text.char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(i, _)| i).collect();
        let i = *at.get(&digits);
        let _ = parse(&format!("{}{number}{}", &text[..i], &text[i + 1..]));
    }
}
