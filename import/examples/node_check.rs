use meganeura_import::*;
use meganeura_ir::interpreter::*;
use meganeura_ir::*;
use prost::Message;
use std::path::Path;
use tract_onnx::pb::TensorProto;
fn tensor(p: &TensorProto) -> Option<Tensor> {
    let dt = match p.data_type {
        1 => DType::F32,
        2 => DType::U8,
        3 => DType::I8,
        4 => DType::U16,
        5 => DType::I16,
        6 => DType::I32,
        7 => DType::I64,
        9 => DType::Bool,
        10 => DType::F16,
        11 => DType::F64,
        12 => DType::U32,
        13 => DType::U64,
        16 => DType::BF16,
        _ => return None,
    };
    let shape: Vec<usize> = p.dims.iter().map(|&d| d as usize).collect();
    Tensor::from_bytes(TensorType::new(dt, shape), p.raw_data.clone()).ok()
}
fn load(p: &Path) -> Option<Tensor> {
    tensor(&TensorProto::decode(&*std::fs::read(p).ok()?).ok()?)
}
fn case(dir: &Path) -> Result<(), String> {
    let model = Model::open(dir.join("model.onnx")).map_err(|e| format!("OPEN {e}"))?;
    let mut ins = vec![];
    let mut b = Bindings::default();
    for (i, inp) in model.inputs().iter().enumerate() {
        let t = load(&dir.join(format!("test_data_set_0/input_{i}.pb"))).ok_or("SKIP input")?;
        b.shapes.insert(inp.name.clone(), t.shape().to_vec());
        ins.push(t);
    }
    // turn int inputs to constants: rewrite the proto
    let bytes = std::fs::read(dir.join("model.onnx")).unwrap();
    let mut m = tract_onnx::pb::ModelProto::decode(&*bytes).unwrap();
    let g = m.graph.as_mut().unwrap();
    let single = g.node.len() == 1;
    let op = g.node[0].op_type.clone();
    if single {
        let n = g.node[0].clone();
        let mut k = 0;
        for (i, name) in n.input.iter().enumerate() {
            if name.is_empty() {
                continue;
            }
            let t = ins[k].clone();
            k += 1;
            let stat = match op.as_str() {
                "Clip" | "Gather" | "PRelu" | "GatherND" | "GatherElements" => false,
                "Range" | "ConstantOfShape" => true,
                _ => {
                    i > 0
                        && (t.dtype().is_int() || t.dtype() == DType::Bool || op == "Dropout" || op == "Resize")
                        && !matches!(
                            op.as_str(),
                            "Add"
                                | "Sub"
                                | "Mul"
                                | "Div"
                                | "Pow"
                                | "Mod"
                                | "Max"
                                | "Min"
                                | "Where"
                                | "Equal"
                                | "Less"
                                | "Greater"
                                | "LessOrEqual"
                                | "GreaterOrEqual"
                                | "And"
                                | "Or"
                                | "Xor"
                                | "MatMul"
                                | "Concat"
                        )
                }
            };
            if stat {
                let p = TensorProto::decode(&*std::fs::read(dir.join(format!("test_data_set_0/input_{}.pb", k - 1))).unwrap())
                    .unwrap();
                let mut p = p;
                p.name = name.clone();
                g.initializer.push(p);
            }
        }
    }
    let model = Model::from_onnx(m.encode_to_vec(), &ImportOptions::default()).map_err(|e| format!("OPEN {e}"))?;
    let mut b2 = Bindings::default();
    let mut ins2 = vec![];
    let orig: Vec<String> = g_inputs(&m);
    for inp in model.inputs() {
        let k = orig.iter().position(|n| *n == inp.name).unwrap();
        b2.shapes.insert(inp.name.clone(), ins[k].shape().to_vec());
        ins2.push(ins[k].clone());
    }
    let s = model.specialize(&b2).map_err(|e| format!("SPEC {e}"))?;
    let w: Vec<Tensor> = model.parameters().iter().map(|p| model.weight(&p.name).unwrap()).collect();
    let e = interpret(&s.graph, &Environment::<f64>::from_tensors(&ins2, &w)).map_err(|e| format!("INTERP {e}"))?;
    for (i, o) in s.graph.outputs().iter().enumerate() {
        let exp = load(&dir.join(format!("test_data_set_0/output_{i}.pb"))).ok_or("SKIP output")?;
        let ty = s.graph.ty(o.node);
        if ty.shape != *exp.shape() {
            return Err(format!("SHAPE {} vs {}", ty, exp.ty()));
        }
        let got = match e.outputs()[i] {
            Value::Float(v) => v.clone(),
            Value::Int(v) => v.iter().map(|&v| v as f64).collect(),
            Value::Bool(v) => v.iter().map(|&v| v as u8 as f64).collect(),
        };
        let want = exp.to_f64_vec();
        let tol = if matches!(exp.dtype(), DType::F16 | DType::BF16) { 2e-2 } else { 1e-4 };
        for (a, b) in got.iter().zip(&want) {
            if a.is_nan() && b.is_nan() {
                continue;
            }
            if a == b {
                continue;
            }
            if !((a - b).abs() <= tol * (1.0 + b.abs())) {
                return Err(format!("VALUE {:?} vs {:?} {:?}", &got[..got.len().min(6)], &want[..want.len().min(6)], s.warnings));
            }
        }
        if !s.warnings.is_empty() {
            return Err(format!("WARN {:?}", s.warnings));
        }
    }
    Ok(())
}
fn g_inputs(m: &tract_onnx::pb::ModelProto) -> Vec<String> {
    m.graph.as_ref().unwrap().input.iter().map(|i| i.name.clone()).collect()
}
fn main() {
    let root = std::env::args().nth(1).unwrap();
    let filter = std::env::args().nth(2).unwrap_or_default();
    let mut dirs: Vec<_> =
        std::fs::read_dir(root).unwrap().map(|d| d.unwrap().path()).filter(|p| p.to_string_lossy().contains(&filter)).collect();
    dirs.sort();
    let (mut ok, mut un) = (0, 0);
    for d in dirs {
        let n = d.file_name().unwrap().to_string_lossy().into_owned();
        match std::panic::catch_unwind(|| case(&d)) {
            Err(_) => println!("{n}: PANIC"),
            Ok(Ok(())) => ok += 1,
            Ok(Err(e))
                if e.contains("not supported:")
                    || e.contains("are not supported")
                    || e.contains("SKIP")
                    || e.contains("only tensors of") =>
            {
                un += 1
            }
            Ok(Err(e)) => println!("{n}: {e}"),
        }
    }
    println!("ok {ok} unsupported {un}");
}
