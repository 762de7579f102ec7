use meganeura_ir::DType;

use crate::proto::type_proto::{Optional, Sequence};
use crate::proto::{TypeProto, ValueInfoProto};
use crate::testing::{ModelBuilder, NodeBuilder, TypeValue, f32s, i64s, node, value_info};
use crate::{Bindings, ImportError};

fn refusal(nodes: Vec<NodeBuilder>, output: &str) -> ImportError {
    let builder = ModelBuilder::new(18)
        .input("x", DType::F32, "2")
        .input("n", DType::I64, "2")
        .initializer("five", &i64s(&[], &[5]))
        .node(node("SequenceConstruct", &["x", "x"], &["pair"]));
    let model = nodes.into_iter().fold(builder, ModelBuilder::node).output(output).open().unwrap();
    model.specialize(&Bindings::default()).unwrap_err()
}

#[test]
fn misuse_of_sequences_is_an_error_that_says_what_is_wrong() {
    let cases = [
        (vec![node("SequenceAt", &["pair", "five"], &["y"])], "index 5 of an axis of 2"),
        (vec![node("SequenceInsert", &["pair", "n"], &["y"])], "one dtype"),
        (vec![node("SequenceConstruct", &["x", "n"], &["y"])], "one dtype"),
        (vec![node("Relu", &["pair"], &["y"])], "input 0 is a sequence: a tensor is needed"),
        (vec![node("SequenceLength", &["x"], &["y"])], "input 0 is a tensor: a sequence is needed"),
        (vec![node("Concat", &["x", "pair"], &["y"]).int("axis", 0)], "input 1 is a sequence"),
        (vec![node("SequenceEmpty", &[], &["e"]), node("ConcatFromSequence", &["e"], &["y"]).int("axis", 0)], "nothing to join"),
        (vec![node("SequenceEmpty", &[], &["e"]), node("SequenceErase", &["e"], &["y"])], "index -1 of an axis of 0"),
        (
            vec![
                node("Concat", &["x", "x"], &["four"]).int("axis", 0),
                node("SequenceInsert", &["pair", "four"], &["q"]),
                node("ConcatFromSequence", &["q"], &["y"]).int("axis", 0).int("new_axis", 1),
            ],
            "tensors of shapes",
        ),
        (vec![node("SplitToSequence", &["x", "five"], &["q"]), node("SequenceAt", &["q", "five"], &["y"])], "index 5"),
    ];
    for (nodes, expected) in cases {
        let error = refusal(nodes, "y").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn positions_that_depend_on_an_input_ask_for_its_value() {
    let first = node("ReduceSum", &["n"], &["at"]).int("keepdims", 0);
    let error = refusal(vec![first, node("SequenceAt", &["pair", "at"], &["y"])], "y");
    assert!(matches!(&error, ImportError::ValuesNeeded { inputs, .. } if *inputs == ["n"]), "{error}");
}

#[test]
fn absent_optional_values_have_no_element() {
    let tensor = value_info("", DType::F32, "2").r#type.unwrap();
    let nothing = node("Optional", &[], &["o"]).type_proto("type", tensor);
    let error = refusal(vec![nothing.clone(), node("OptionalGetElement", &["o"], &["y"])], "y");
    assert!(error.to_string().contains("there is no element to get"), "{error}");

    let model = ModelBuilder::new(18).input("x", DType::F32, "2").node(nothing).node(node("OptionalHasElement", &["o"], &["y"]));
    let results = crate::testing::run(&model.output("y"), &[f32s(&[2], &[0.; 2])]);
    assert_eq!(results[0].1, [0.]);
}

#[test]
fn sequences_and_optional_values_are_no_inputs_and_no_outputs() {
    assert!(
        matches!(refusal(vec![], "pair"), ImportError::OutputType { name, found } if name == "pair" && found == "a sequence")
    );

    let tensor = value_info("", DType::F32, "2").r#type.map(Box::new);
    let kinds = [
        (TypeValue::SequenceType(Sequence { elem_type: tensor.clone() }), "a sequence"),
        (TypeValue::OptionalType(Optional { elem_type: tensor }), "an optional value"),
    ];
    for (kind, expected) in kinds {
        let mut builder = ModelBuilder::new(18).node(node("Identity", &["q"], &["y"])).output("y");
        let ty = TypeProto { value: Some(kind), ..Default::default() };
        let input = ValueInfoProto { name: "q".to_owned(), r#type: Some(ty), ..Default::default() };
        builder.0.graph.as_mut().unwrap().input.push(input);
        let error = builder.open().unwrap_err();
        assert!(matches!(&error, ImportError::InputType { found, .. } if found == expected), "{error}");
    }
}
