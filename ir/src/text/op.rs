//! Ops and their attributes: one way for printing, the other for parsing.

use std::sync::Arc;

use super::attributes::Attributes;
use super::{ParseErrorKind, constant};
use crate::{
    ArgOp, AttentionDims, AttentionOperand, BinaryOp, CompareOp, Composite, ConvDims, DotDims, Op, PadDim, Real, ReduceOp,
    ScatterOp, SliceDim, TensorType, UnaryOp, WindowDims,
};

impl Op {
    /// What the name of the op and the type of its result leave open, as the text form prints it. The names of inputs and parameters are
    /// not attributes.
    pub fn attributes(&self) -> Vec<(&'static str, String)> {
        attributes(self)
    }
}

/// What the name of `op` and the type of its result leave open. The names of inputs and parameters are not attributes.
pub(super) fn attributes(op: &Op) -> Vec<(&'static str, String)> {
    match op {
        Op::Input(_) | Op::Parameter(_) => vec![],
        Op::Constant(tensor) => vec![constant::print(tensor)],
        Op::Iota { axis, .. } => vec![("axis", axis.to_string())],
        Op::RandomUniform { stream, .. } => vec![("stream", stream.to_string())],
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) | Op::Reshape(_) => vec![],
        Op::Transpose(perm) => vec![("perm", list(perm))],
        Op::Broadcast { axes, .. } => vec![("axes", list(axes))],
        Op::Slice(dims) => vec![
            ("start", list(dims.iter().map(|d| d.start))),
            ("step", list(dims.iter().map(|d| d.step))),
            ("size", list(dims.iter().map(|d| d.size))),
        ],
        Op::Pad(dims) => vec![
            ("low", list(dims.iter().map(|d| d.low))),
            ("high", list(dims.iter().map(|d| d.high))),
            ("interior", list(dims.iter().map(|d| d.interior))),
        ],
        Op::Concat { axis } => vec![("axis", axis.to_string())],
        Op::Unfold(window) => window_attributes(window),
        Op::Fold { window, sizes } => {
            let mut attributes = window_attributes(window);
            attributes.push(("sizes", list(sizes)));
            attributes
        }
        Op::Dot(dims) => [("batch", &dims.lhs_batch, &dims.rhs_batch), ("contract", &dims.lhs_contract, &dims.rhs_contract)]
            .into_iter()
            .filter(|(_, lhs, rhs)| !lhs.is_empty() || !rhs.is_empty())
            .map(|(key, lhs, rhs)| (key, format!("{}x{}", list(lhs), list(rhs))))
            .collect(),
        Op::Conv(dims) => vec![
            ("stride", list(&dims.stride)),
            ("pads", pads(&dims.pads)),
            ("input_dilation", list(&dims.input_dilation)),
            ("kernel_dilation", list(&dims.kernel_dilation)),
            ("groups", dims.groups.to_string()),
        ],
        Op::Reduce { axes, .. } => vec![("axes", list(axes))],
        Op::ArgReduce { axis, .. } | Op::Gather { axis } | Op::Scatter { axis, .. } => vec![("axis", axis.to_string())],
        Op::Composite(composite) => composite_attributes(composite),
    }
}

fn composite_attributes(composite: &Composite) -> Vec<(&'static str, String)> {
    match composite {
        Composite::Softmax { axis } | Composite::LogSoftmax { axis } => vec![("axis", axis.to_string())],
        Composite::Normalize { axes, epsilon } | Composite::RmsNormalize { axes, epsilon } => {
            vec![("axes", list(axes)), ("epsilon", real(*epsilon))]
        }
        Composite::Gelu | Composite::GeluTanh | Composite::Silu | Composite::Relu => vec![],
        Composite::MaxPool(window) => window_attributes(window),
        Composite::Attention(dims) | Composite::AttentionLse(dims) | Composite::AttentionGradient { dims, .. } => {
            attention_attributes(dims)
        }
    }
}

fn attention_attributes(dims: &AttentionDims) -> Vec<(&'static str, String)> {
    let softcap = dims.softcap.map(|cap| ("softcap", real(cap)));
    let causal = dims.causal.map(|offset| ("causal", offset.to_string()));
    let guarded = dims.guarded.then(|| ("guarded", "true".to_string()));
    [("scale", real(dims.scale))].into_iter().chain(softcap).chain(causal).chain(guarded).collect()
}

fn window_attributes(window: &WindowDims) -> Vec<(&'static str, String)> {
    vec![
        ("size", list(&window.size)),
        ("stride", list(&window.stride)),
        ("dilation", list(&window.dilation)),
        ("pads", pads(&window.pads)),
    ]
}

fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    format!("[{}]", items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(","))
}

fn pads(pads: &[(isize, isize)]) -> String {
    list(pads.iter().map(|(low, high)| format!("{low}:{high}")))
}

fn real(value: Real) -> String {
    if value.0.is_nan() { format!("{:#x}", value.0.to_bits()) } else { format!("{:?}", value.0) }
}

/// The op called `name` whose result has type `ty`. Takes the attributes it needs.
pub(super) fn parse(name: &str, a: &mut Attributes, ty: &TensorType) -> Result<Op, ParseErrorKind> {
    let pointwise = (UnaryOp::from_name(name).map(Op::Unary))
        .or_else(|| BinaryOp::from_name(name).map(Op::Binary))
        .or_else(|| CompareOp::from_name(name).map(Op::Compare));
    if let Some(op) = pointwise {
        return Ok(op);
    }
    if let Some(op) = ReduceOp::from_name(name) {
        return Ok(Op::Reduce { op, axes: a.numbers("axes")? });
    }
    if let Some(op) = ArgOp::from_name(name) {
        return Ok(Op::ArgReduce { op, axis: a.number("axis")? });
    }
    if let Some(op) = ScatterOp::from_name(name) {
        return Ok(Op::Scatter { op, axis: a.number("axis")? });
    }
    Ok(match name {
        "constant" => Op::Constant(Arc::new(if a.has("values") {
            constant::from_values(ty, &a.list("values")?)?
        } else {
            constant::from_hexadecimal(ty, a.atom("bytes")?)?
        })),
        "iota" => Op::Iota { dtype: ty.dtype, shape: ty.shape.clone(), axis: a.number("axis")? },
        "random_uniform" => Op::RandomUniform { shape: ty.shape.clone(), stream: a.number("stream")? },
        "select" => Op::Select,
        "cast" => Op::Cast(ty.dtype),
        "reshape" => Op::Reshape(ty.shape.clone()),
        "transpose" => Op::Transpose(a.numbers("perm")?),
        "broadcast" => Op::Broadcast { shape: ty.shape.clone(), axes: a.numbers("axes")? },
        "slice" => Op::Slice(
            zip3(a.numbers("start")?, a.numbers("step")?, a.numbers("size")?, "step and size")?
                .map(|(start, step, size)| SliceDim { start, step, size })
                .collect(),
        ),
        "pad" => Op::Pad(
            zip3(a.numbers("low")?, a.numbers("high")?, a.numbers("interior")?, "high and interior")?
                .map(|(low, high, interior)| PadDim { low, high, interior })
                .collect(),
        ),
        "concat" => Op::Concat { axis: a.number("axis")? },
        "unfold" => Op::Unfold(window(a)?),
        "fold" => Op::Fold { window: window(a)?, sizes: a.numbers("sizes")? },
        "dot" => {
            let (lhs_batch, rhs_batch) = a.axis_pair("batch")?;
            let (lhs_contract, rhs_contract) = a.axis_pair("contract")?;
            Op::Dot(DotDims { lhs_batch, rhs_batch, lhs_contract, rhs_contract })
        }
        "conv" => Op::Conv(ConvDims {
            stride: a.numbers("stride")?,
            pads: a.pads("pads")?,
            input_dilation: a.numbers("input_dilation")?,
            kernel_dilation: a.numbers("kernel_dilation")?,
            groups: a.number("groups")?,
        }),
        "gather" => Op::Gather { axis: a.number("axis")? },
        "softmax" => Op::Composite(Composite::Softmax { axis: a.number("axis")? }),
        "log_softmax" => Op::Composite(Composite::LogSoftmax { axis: a.number("axis")? }),
        "normalize" => Op::Composite(Composite::Normalize { axes: a.numbers("axes")?, epsilon: a.real("epsilon")? }),
        "rms_normalize" => Op::Composite(Composite::RmsNormalize { axes: a.numbers("axes")?, epsilon: a.real("epsilon")? }),
        "gelu" => Op::Composite(Composite::Gelu),
        "gelu_tanh" => Op::Composite(Composite::GeluTanh),
        "silu" => Op::Composite(Composite::Silu),
        "relu" => Op::Composite(Composite::Relu),
        "max_pool" => Op::Composite(Composite::MaxPool(window(a)?)),
        "attention" => Op::Composite(Composite::Attention(attention(a)?)),
        "attention_lse" => Op::Composite(Composite::AttentionLse(attention(a)?)),
        "attention_dq" => gradient(a, AttentionOperand::Query)?,
        "attention_dk" => gradient(a, AttentionOperand::Key)?,
        "attention_dv" => gradient(a, AttentionOperand::Value)?,
        _ => return Err(ParseErrorKind::UnknownOp(name.into())),
    })
}

fn attention(a: &mut Attributes) -> Result<AttentionDims, ParseErrorKind> {
    Ok(AttentionDims {
        scale: a.real("scale")?,
        softcap: a.has("softcap").then(|| a.real("softcap")).transpose()?,
        causal: a.has("causal").then(|| a.number("causal")).transpose()?,
        guarded: a.has("guarded") && a.number("guarded")?,
    })
}

fn gradient(a: &mut Attributes, of: AttentionOperand) -> Result<Op, ParseErrorKind> {
    Ok(Op::Composite(Composite::AttentionGradient { dims: attention(a)?, of }))
}

fn window(a: &mut Attributes) -> Result<WindowDims, ParseErrorKind> {
    Ok(WindowDims {
        size: a.numbers("size")?,
        stride: a.numbers("stride")?,
        dilation: a.numbers("dilation")?,
        pads: a.pads("pads")?,
    })
}

/// Triples of three equally long lists; `others` names the last two in the error.
fn zip3<A, B, C>(
    a: Vec<A>,
    b: Vec<B>,
    c: Vec<C>,
    others: &'static str,
) -> Result<impl Iterator<Item = (A, B, C)>, ParseErrorKind> {
    if a.len() != b.len() || a.len() != c.len() {
        return Err(ParseErrorKind::Expected {
            expected: "lists of equal length",
            found: format!("{others}: {} and {} beside {}", b.len(), c.len(), a.len()),
        });
    }
    Ok(a.into_iter().zip(b).zip(c).map(|((a, b), c)| (a, b, c)))
}
