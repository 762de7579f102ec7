//! Sparse initializers.

use meganeura_ir::DType;

use crate::proto::{SparseTensorProto, TensorProto};
use crate::testing::{ModelBuilder, evaluate, f32s, i64s, node, tensor_proto};
use crate::{Bindings, ImportError, ImportOptions, Limit, Model, TensorError, write_artifact, write_onnx};

fn sparse(values: TensorProto, indices: TensorProto, dims: &[i64]) -> ModelBuilder {
    let mut builder = ModelBuilder::new(17).input("x", DType::F32, "2,3").node(node("Mul", &["x", "w"], &["y"])).output("y");
    let sparse = SparseTensorProto { values: Some(values), indices: Some(indices), dims: dims.to_vec() };
    builder.0.graph.as_mut().unwrap().sparse_initializer.push(sparse);
    builder
}

fn values() -> TensorProto {
    tensor_proto("w", &f32s(&[2], &[5., 7.]))
}

#[test]
fn sparse_initializers_are_dense_parameters_and_stay_so_in_files() {
    let dense = f32s(&[2, 3], &[0., 5., 0., 0., 0., 7.]);
    for indices in [i64s(&[2], &[1, 5]), i64s(&[2, 2], &[0, 1, 1, 2])] {
        let model = sparse(values(), tensor_proto("", &indices), &[2, 3]).open().unwrap();
        assert_eq!(model.weight("w").unwrap(), dense);
        let specialized = model.specialize(&Bindings::default()).unwrap();
        let y = evaluate(&model, &specialized.graph, &[f32s(&[2, 3], &[1., 2., 3., 4., 5., 6.])]);
        assert_eq!(y[0].1, [0., 10., 0., 0., 0., 42.]);

        let (mut onnx, mut artifact) = (Vec::new(), Vec::new());
        write_onnx(&mut onnx, &model, &|name| model.weight(name)).unwrap();
        assert_eq!(Model::from_onnx(onnx, &ImportOptions::default()).unwrap().weight("w").unwrap(), dense);
        write_artifact(&mut artifact, &model, &|name| model.weight(name)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, artifact).unwrap();
        assert_eq!(Model::open(path).unwrap().weight("w").unwrap(), dense);
    }
}

#[test]
fn malformed_sparse_initializers_are_refused() {
    let indices = |shape: &[usize], values: &[i64]| tensor_proto("", &i64s(shape, values));
    let cases = [
        ("descending", indices(&[2], &[5, 1]), [2, 3]),
        ("repeated", indices(&[2], &[1, 1]), [2, 3]),
        ("outside", indices(&[2], &[1, 6]), [2, 3]),
        ("negative", indices(&[2], &[-1, 5]), [2, 3]),
        ("column outside", indices(&[2, 2], &[0, 3, 1, 2]), [2, 3]),
        ("too few", indices(&[1], &[1]), [2, 3]),
        ("wrong rank", indices(&[2, 1], &[1, 5]), [2, 3]),
        ("no integers", tensor_proto("", &f32s(&[2], &[1., 5.])), [2, 3]),
        ("negative size", indices(&[2], &[1, 5]), [-2, 3]),
    ];
    for (what, indices, dims) in cases {
        let error = sparse(values(), indices, &dims).open().unwrap_err();
        let ImportError::Tensor { name, source } = &error else { panic!("{what}: {error}") };
        assert!(name == "w" && matches!(source, TensorError::Sparse(_) | TensorError::Shape(_)), "{what}: {error}");
    }
}

#[test]
fn a_small_file_cannot_claim_much_memory() {
    let builder = sparse(values(), tensor_proto("", &i64s(&[2], &[1, 5])), &[1 << 15, 1 << 15]);
    let ImportError::Limit(error) = builder.open().unwrap_err() else { panic!("accepted") };
    assert_eq!((error.limit, error.found), (Limit::DenseBytes, 1 << 32));
}
