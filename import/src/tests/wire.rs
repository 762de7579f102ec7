use meganeura_ir::DType;
use proptest::prelude::*;

use crate::testing::{ModelBuilder, f32s, i64s, node};
use crate::{Bindings, ImportError, ImportOptions, Limit, Model, WireError};

/// A model with raw data in an initializer and in an attribute.
fn sample() -> ModelBuilder {
    ModelBuilder::new(17)
        .input("x", DType::F32, "batch,3")
        .initializer("weight", &f32s(&[3, 2], &[1., 2., 3., 4., 5., 6.]))
        .node(node("Constant", &[], &["target"]).tensor("value", &i64s(&[2], &[-1, 2])))
        .node(node("MatMul", &["x", "weight"], &["product"]))
        .node(node("Reshape", &["product", "target"], &["y"]))
        .output("y")
}

fn open(bytes: &[u8]) -> Result<Model, ImportError> {
    let model = Model::from_onnx(bytes.to_vec(), &ImportOptions::default())?;
    for parameter in model.parameters() {
        model.weight(&parameter.name)?;
    }
    let shapes = [("x".to_owned(), vec![2, 3])].into();
    model.specialize(&Bindings { shapes, ..Bindings::default() })?;
    Ok(model)
}

#[test]
fn raw_data_stays_in_the_file() {
    let model = sample().open().unwrap();
    assert_eq!(model.graph.initializer[0].raw_data.len(), 24, "a locator stands for the data");
    assert_eq!(model.weight("weight").unwrap(), f32s(&[3, 2], &[1., 2., 3., 4., 5., 6.]));
}

#[test]
fn a_file_that_is_cut_anywhere_is_an_error() {
    // The opset import is written last, so every cut loses something that a model needs.
    let mut bytes = sample().bytes();
    let opset = [0x42, 0x02, 0x10, 17];
    let at = bytes.windows(4).position(|w| w == opset).unwrap();
    let import: Vec<u8> = bytes.drain(at..at + 4).collect();
    bytes.extend(import);
    open(&bytes).unwrap();
    for length in 0..bytes.len() {
        assert!(open(&bytes[..length]).is_err(), "{length} of {} bytes were accepted", bytes.len());
    }
}

#[test]
fn nested_messages_have_a_limit() {
    // Graph (7) -> node (1) -> attribute (5) -> graph (6), over and over.
    let mut message: Vec<u8> = Vec::new();
    for level in 0..198 {
        let tag = [6u8, 5, 1][level % 3] << 3 | 2;
        let mut outer = vec![tag];
        let mut length = message.len();
        while length >= 0x80 {
            outer.push(length as u8 | 0x80);
            length >>= 7;
        }
        outer.push(length as u8);
        outer.extend(&message);
        message = outer;
    }
    let mut length = Vec::new();
    let mut rest = message.len();
    while rest >= 0x80 {
        length.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    length.push(rest as u8);
    let file = [vec![7 << 3 | 2], length, message].concat();
    let Err(ImportError::Wire(WireError::Limit(error))) = open(&file) else { panic!("accepted") };
    assert_eq!(error.limit, Limit::SubgraphDepth);
}

#[test]
fn text_is_no_model() {
    for text in ["version https://git-lfs.github.com/spec/v1\n", "<html>", "\0\0\0\0"] {
        assert!(
            matches!(open(text.as_bytes()), Err(ImportError::Wire(_) | ImportError::Decode(_) | ImportError::NoGraph)),
            "{text}"
        );
    }
    assert!(matches!(open(b""), Err(ImportError::Empty)));
}

proptest! {
    #[test]
    fn damaged_files_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = sample().bytes();
        for (index, byte) in edits {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = open(&bytes);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = open(&bytes);
    }
}
