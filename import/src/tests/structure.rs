use meganeura_ir::{DType, ParameterRole, Tensor};
use proptest::prelude::*;

use crate::testing::{ModelBuilder, bools, f32s, i64s, node, tensor_proto, value_info};
use crate::{Dim, ImportError, ImportOptions, Model, StructureError, Warning};

fn base() -> ModelBuilder {
    ModelBuilder::new(17).input("x", DType::F32, "2,3")
}

fn names(model: &Model) -> Vec<&str> {
    model.parameters().iter().map(|p| p.name.as_str()).collect()
}

#[test]
fn every_unsupported_operator_is_listed_at_once() {
    let error = base()
        .node(node("Frobnicate", &["x"], &["a"]))
        .node(node("Relu", &["a"], &["b"]))
        .node(node("Frobnicate", &["b"], &["c"]))
        .node(node("Add", &["c", "c"], &["y"]).domain("com.example"))
        .output("y")
        .open()
        .unwrap_err();
    let ImportError::UnsupportedOps(ops) = &error else { panic!("{error}") };
    let listed: Vec<_> = ops.iter().map(|o| (o.domain.as_str(), o.op.as_str(), o.opset, o.count)).collect();
    assert_eq!(listed, [("", "Frobnicate", Some(17), 2), ("com.example", "Add", None, 1)]);
    let text = error.to_string();
    assert!(text.contains("Frobnicate (opset 17), 2 nodes, first that computes \"a\""), "{text}");
}

#[test]
fn pruned_branches_need_no_support() {
    let builder = base()
        .input("unused", DType::F32, "1")
        .node(node("Frobnicate", &["unused"], &["label"]))
        .node(node("Relu", &["x"], &["y"]))
        .output("label")
        .output("y");
    let outputs = |names: &[&str]| ImportOptions {
        outputs: Some(names.iter().map(|n| (*n).to_owned()).collect()),
        ..ImportOptions::default()
    };
    let model = Model::from_onnx(builder.bytes(), &outputs(&["y"])).unwrap();
    assert_eq!(model.inputs().len(), 1);
    assert_eq!(model.outputs().len(), 1);
    assert_eq!(model.op_counts().iter().collect::<Vec<_>>(), [(&"Relu".to_owned(), &1)]);
    let error = Model::from_onnx(builder.bytes(), &outputs(&["z"])).unwrap_err();
    assert!(error.to_string().contains("label, y"), "{error}");
}

#[test]
fn broken_graphs_are_named() {
    let structure = |builder: ModelBuilder| match builder.open().unwrap_err() {
        ImportError::Structure(e) => e,
        other => panic!("{other}"),
    };
    let relu = |from: &str, to: &str| node("Relu", &[from], &[to]);
    let error = structure(base().node(relu("b", "y")).node(relu("x", "b")).output("y"));
    assert!(matches!(error, StructureError::Order { name, .. } if name == "b"));
    let error = structure(base().node(relu("ghost", "y")).output("y"));
    assert!(matches!(error, StructureError::Undefined { name, .. } if name == "ghost"));
    let error = structure(base().node(relu("x", "y")).node(relu("x", "y")).output("y"));
    assert!(matches!(error, StructureError::Duplicate { name, .. } if name == "y"));
    let error = structure(base().node(relu("x", "x")).output("x"));
    assert!(matches!(error, StructureError::Duplicate { name, .. } if name == "x"));
    let weight = f32s(&[1], &[1.]);
    let error = structure(base().initializer("w", &weight).initializer("w", &weight).output("w"));
    assert!(matches!(error, StructureError::Duplicate { name, .. } if name == "w"));
    let error = structure(base().output("nothing"));
    assert!(matches!(error, StructureError::Undefined { name, .. } if name == "nothing"));
    let error = structure(base().tensor(tensor_proto("", &weight)).output("x"));
    assert_eq!(error, StructureError::UnnamedInitializer);
}

#[test]
fn versions_are_checked() {
    let relu = |builder: ModelBuilder| builder.input("x", DType::F32, "1").node(node("Relu", &["x"], &["y"])).output("y");
    assert!(matches!(relu(ModelBuilder::new(5)).open(), Err(ImportError::Opset(5))));
    let newer = relu(ModelBuilder::new(99)).open().unwrap();
    assert!(matches!(newer.warnings(), [Warning::Opset { found: 99, .. }]));
    let mut old = relu(ModelBuilder::new(9));
    old.0.ir_version = 2;
    assert!(matches!(old.open(), Err(ImportError::IrVersion(2))));
    let mut none = relu(ModelBuilder::new(9));
    none.0.opset_import.clear();
    assert!(matches!(none.open(), Err(ImportError::NoOpset)));
    let mut spelled = relu(ModelBuilder::new(9));
    spelled.0.opset_import[0].domain = "ai.onnx".to_owned();
    spelled.open().unwrap();
}

#[test]
fn inputs_are_described() {
    let mut builder = base().input("s", DType::I64, "batch,?").output("x").output("s").output("free");
    let mut free = value_info("free", DType::F16, "");
    if let Some(crate::testing::TypeValue::TensorType(t)) = free.r#type.as_mut().and_then(|t| t.value.as_mut()) {
        t.shape = None;
    }
    builder.0.graph.as_mut().unwrap().input.push(free);
    let model = builder.open().unwrap();
    let [x, s, free] = model.inputs() else { panic!() };
    assert_eq!(x.dims, [Dim::Fixed(2), Dim::Fixed(3)]);
    assert_eq!(s.dims, [Dim::Symbol("batch".into()), Dim::Symbol("s.1".into())]);
    assert_eq!((s.dtype, s.ranked), (DType::I64, true));
    assert_eq!((free.dtype, free.ranked), (DType::F16, false));
}

#[test]
fn inputs_that_are_no_tensors_of_numbers_are_refused() {
    let mut builder = base().output("x");
    let mut text = value_info("text", DType::F32, "1");
    if let Some(crate::testing::TypeValue::TensorType(t)) = text.r#type.as_mut().and_then(|t| t.value.as_mut()) {
        t.elem_type = 8;
    }
    builder.0.graph.as_mut().unwrap().input.push(text);
    let error = builder.open().unwrap_err().to_string();
    assert!(error.contains("\"text\"") && error.contains("string"), "{error}");
}

#[test]
fn initializers_that_are_also_inputs_are_parameters() {
    let model = base()
        .input("w", DType::F32, "3")
        .initializer("w", &f32s(&[3], &[1., 2., 3.]))
        .node(node("Add", &["x", "w"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    assert_eq!(model.inputs().len(), 1);
    assert_eq!(names(&model), ["w"]);
}

#[test]
fn roles_follow_dtype_use_and_name() {
    let vector = |value: f32| f32s(&[3], &[value; 3]);
    let big = f32s(&[1, 3, 6], &[0.5; 18]);
    let builder = ModelBuilder::new(17)
        .input("x", DType::F32, "2,3,6")
        .initializer("scale", &vector(1.0))
        .initializer("bias", &vector(0.0))
        .initializer("stored_mean", &f32s(&[1, 3], &[0.0; 3]))
        .initializer("var", &vector(1.0))
        .initializer("low", &f32s(&[], &[-1.0]))
        .initializer("val_7", &f32s(&[], &[2.0]))
        .initializer("temperature", &f32s(&[], &[2.0]))
        .initializer("rope.inv_freq", &f32s(&[6], &[1.0; 6]))
        .initializer("unused", &vector(1.0))
        .initializer("axes", &i64s(&[1], &[0]))
        .node(node("Squeeze", &["stored_mean", "axes"], &["mean"]))
        .node(node("BatchNormalization", &["x", "scale", "bias", "mean", "var"], &["n"]))
        .node(node("Clip", &["n", "low"], &["c"]))
        .node(node("Mul", &["c", "val_7"], &["m"]))
        .node(node("Mul", &["m", "temperature"], &["t"]))
        .node(node("Mul", &["t", "rope.inv_freq"], &["r"]))
        .node(node("Constant", &[], &["table"]).tensor("value", &big))
        .node(node("Add", &["r", "table"], &["y"]))
        .output("y");
    let model = builder.open().unwrap();
    let found: Vec<_> = model.parameters().iter().map(|p| (p.name.as_str(), p.role, p.trainable)).collect();
    use ParameterRole::{Statistic, Weight};
    assert_eq!(
        found,
        [
            ("scale", Weight, true),
            ("bias", Weight, true),
            ("stored_mean", Statistic, false),
            ("var", Statistic, false),
            ("temperature", Weight, true),
            ("rope.inv_freq", Statistic, false),
            ("table", Weight, false),
        ]
    );
}

#[test]
fn large_constant_nodes_are_weights_where_no_initializer_is() {
    let weight = f32s(&[3, 6], &[0.5; 18]);
    let model = base()
        .node(node("Constant", &[], &["w"]).tensor("value", &weight))
        .node(node("MatMul", &["x", "w"], &["y"]))
        .output("y")
        .open()
        .unwrap();
    assert_eq!(names(&model), ["w"]);
    assert!(model.parameters()[0].trainable);
    assert_eq!(model.weight("w").unwrap(), weight);
}

#[test]
fn weights_keep_the_dtype_of_the_file_in_every_encoding() {
    let values = [1.0, -2.5, 0.375];
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let tensor = Tensor::from_f64(dtype, [3], &values);
        let mut typed = tensor_proto("w", &tensor);
        typed.raw_data.clear();
        match dtype {
            DType::F32 => typed.float_data = tensor.to_f32_vec(),
            DType::F64 => typed.double_data = values.to_vec(),
            // Half floats travel as their bits.
            _ => typed.int32_data = tensor.bytes().chunks(2).map(|b| i32::from(u16::from_le_bytes([b[0], b[1]]))).collect(),
        }
        for proto in [tensor_proto("w", &tensor), typed] {
            let model = base().tensor(proto).node(node("Add", &["x", "w"], &["y"])).output("y").open().unwrap();
            assert_eq!(model.parameters()[0].stored, dtype);
            assert_eq!(model.weight("w").unwrap(), tensor, "{dtype}");
        }
    }
}

#[test]
fn integer_initializers_are_read_in_every_encoding() {
    let constant = |proto| {
        let model = ModelBuilder::new(17).tensor(proto).node(node("Identity", &["c"], &["y"])).output("y").open().unwrap();
        let specialized = model.specialize(&Default::default()).unwrap();
        crate::testing::evaluate(&model, &specialized.graph, &[])[0].1.clone()
    };
    for dtype in DType::ALL.into_iter().filter(|d| !d.is_float()) {
        let tensor = Tensor::from_i64(dtype, [3], &[1, 0, 100]);
        let mut typed = tensor_proto("c", &tensor);
        typed.raw_data.clear();
        let values = tensor.to_i64_vec();
        match dtype {
            DType::I64 => typed.int64_data = values,
            DType::U32 | DType::U64 => typed.uint64_data = values.iter().map(|&v| v as u64).collect(),
            _ => typed.int32_data = values.iter().map(|&v| v as i32).collect(),
        }
        let expected = tensor.to_f64_vec();
        assert_eq!(constant(tensor_proto("c", &tensor)), expected, "{dtype} raw");
        assert_eq!(constant(typed), expected, "{dtype} typed");
    }
}

#[test]
fn damaged_tensors_are_errors_that_name_them() {
    let open = |edit: &dyn Fn(&mut crate::proto::TensorProto)| {
        let mut proto = tensor_proto("w", &f32s(&[3], &[1., 2., 3.]));
        edit(&mut proto);
        let model = base().tensor(proto).node(node("Add", &["x", "w"], &["y"])).output("y").open()?;
        model.weight("w").map(|_| ())
    };
    open(&|_| {}).unwrap();
    let edits: [&dyn Fn(&mut crate::proto::TensorProto); 5] = [
        &|p| p.raw_data.truncate(11),
        &|p| p.dims = vec![-3],
        &|p| p.dims = vec![1 << 40, 1 << 40],
        &|p| p.dims = vec![1 << 30, 4],
        &|p| p.dims = vec![1; 9],
    ];
    for edit in edits {
        let error = open(edit).unwrap_err();
        assert!(matches!(&error, ImportError::Tensor { name, .. } if name == "w"), "{error}");
    }
    let error = open(&|p| p.data_type = 8).unwrap_err();
    assert!(error.to_string().contains("string"), "{error}");
}

/// Extreme settings of operators that do index arithmetic.
fn hostile(values: Vec<i64>, extent: usize) {
    let x = format!("1,1,{extent},2");
    let list = &values[..2];
    let four = &values[..4];
    let nodes = [
        node("Conv", &["x", "w"], &["y"]).ints("strides", list).ints("pads", four),
        node("Conv", &["x", "w"], &["y"]).ints("dilations", list).string("auto_pad", "SAME_UPPER"),
        node("ConvTranspose", &["x", "w"], &["y"]).ints("strides", list).ints("output_padding", list),
        node("ConvTranspose", &["x", "w"], &["y"]).ints("output_shape", list).ints("dilations", list),
        node("MaxPool", &["x"], &["y"]).ints("kernel_shape", list).ints("pads", four).int("ceil_mode", 1),
        node("AveragePool", &["x"], &["y"]).ints("kernel_shape", list).ints("strides", list).int("ceil_mode", 1),
        node("Pad", &["x", "many"], &["y"]),
        node("Slice", &["x", "two", "many2", "axes", "two"], &["y"]),
        node("Reshape", &["x", "four"], &["y"]),
        node("Expand", &["x", "four"], &["y"]),
        node("Tile", &["x", "four"], &["y"]),
        node("Range", &["first", "second", "third"], &["y"]),
        node("ConstantOfShape", &["four"], &["y"]),
        node("Split", &["x", "two"], &["y", "z"]),
        node("Gather", &["x", "two"], &["y"]).int("axis", values[2]),
        node("Softmax", &["x"], &["y"]).int("axis", values[0]),
        node("Transpose", &["x"], &["y"]).ints("perm", four),
        node("Trilu", &["x", "first"], &["y"]),
        node("Resize", &["x", "", "", "four"], &["y"]),
        node("Shape", &["x"], &["y"]).int("start", values[0]).int("end", values[1]),
    ];
    for node in nodes {
        let model = ModelBuilder::new(17)
            .input("x", DType::F32, &x)
            .initializer("w", &f32s(&[1, 1, 2, 2], &[1.; 4]))
            .initializer("mask", &bools(&[1], &[1]))
            .initializer("many", &i64s(&[8], &values[..8]))
            .initializer("many2", &i64s(&[2], &values[2..4]))
            .initializer("two", &i64s(&[2], list))
            .initializer("axes", &i64s(&[2], &[2, 3]))
            .initializer("four", &i64s(&[4], four))
            .initializer("first", &i64s(&[], &values[..1]))
            .initializer("second", &i64s(&[], &values[1..2]))
            .initializer("third", &i64s(&[], &values[2..3]))
            .node(node)
            .output("y");
        if let Ok(model) = model.open() {
            let _ = model.specialize(&Default::default());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn extreme_settings_never_panic(
        values in prop::collection::vec(
            prop_oneof![
                -3i64..4,
                any::<i64>(),
                Just(i64::MAX),
                Just(i64::MIN),
                Just(1 << 31),
                Just((1 << 31) - 1),
                Just(1 << 32),
                60_000i64..70_000,
            ],
            8,
        ),
        extent in 0usize..4,
    ) {
        hostile(values, extent);
    }
}
