use super::{Samples, f32s, typed};
use crate::{AttentionDims, AttentionOperand, Composite, DType, Op, Real, TensorType};

pub(super) fn add(samples: &mut Samples) {
    for case in CASES {
        for composite in case.composites() {
            let op = Op::Composite(composite);
            let operands = case.operands(&op);
            samples.add(format!("{} {}", op.name(), case.name), &operands, |g, x| g.push(op, x));
        }
    }
}

/// Sizes, and what stands between scores and weights.
struct Case {
    name: &'static str,
    /// `[batch.., Lq, d]`
    q: &'static [usize],
    /// `[batch.., Lk, d]`
    k: &'static [usize],
    value_size: usize,
    mask: Option<(DType, &'static [usize])>,
    softcap: Option<f64>,
    causal: Option<i64>,
    guarded: bool,
}

const PLAIN: Case =
    Case { name: "plain", q: &[2, 7, 5], k: &[2, 9, 5], value_size: 5, mask: None, softcap: None, causal: None, guarded: false };

const CASES: [Case; 15] = [
    PLAIN,
    Case { name: "without a batch", q: &[7, 3], k: &[6, 3], value_size: 4, ..PLAIN },
    Case { name: "of one query", q: &[3, 1, 8], k: &[3, 37, 8], value_size: 8, ..PLAIN },
    Case { name: "of one key", q: &[2, 7, 5], k: &[2, 1, 5], value_size: 3, ..PLAIN },
    Case { name: "of size 1", q: &[2, 6, 1], k: &[2, 5, 1], value_size: 1, ..PLAIN },
    Case { name: "of more than a tile", q: &[1, 2, 67, 17], k: &[1, 2, 35, 17], value_size: 19, ..PLAIN },
    Case { name: "of large heads", q: &[1, 5, 97], k: &[1, 6, 97], value_size: 133, ..PLAIN },
    Case { name: "causal", q: &[2, 33, 5], k: &[2, 33, 5], causal: Some(0), ..PLAIN },
    Case { name: "causal after a cache", q: &[2, 5, 4], k: &[2, 21, 4], causal: Some(16), ..PLAIN },
    Case { name: "of grouped heads", q: &[2, 2, 3, 7, 4], k: &[2, 2, 1, 18, 4], causal: Some(11), ..PLAIN },
    Case { name: "of one key for all heads", q: &[3, 2, 6, 4], k: &[1, 2, 5, 4], value_size: 2, ..PLAIN },
    Case { name: "with a bias per key", q: &[2, 2, 6, 4], k: &[2, 2, 19, 4], mask: Some((DType::F32, &[2, 1, 1, 19])), ..PLAIN },
    Case { name: "with a whole bias", mask: Some((DType::F32, &[2, 7, 9])), softcap: Some(0.7), ..PLAIN },
    Case { name: "with a bool mask", k: &[2, 41, 5], mask: Some((DType::Bool, &[1, 7, 41])), guarded: true, ..PLAIN },
    Case {
        name: "with everything",
        q: &[2, 1, 2, 20, 6],
        k: &[1, 1, 1, 34, 6],
        value_size: 3,
        mask: Some((DType::F32, &[1, 1, 2, 1, 34])),
        softcap: Some(1.5),
        causal: Some(14),
        guarded: true,
    },
];

impl Case {
    fn composites(&self) -> Vec<Composite> {
        use AttentionOperand::*;
        let dims =
            AttentionDims { scale: Real(0.4), softcap: self.softcap.map(Real), causal: self.causal, guarded: self.guarded };
        let gradients = [Query, Key, Value].map(|of| Composite::AttentionGradient { dims: dims.clone(), of });
        [Composite::Attention(dims.clone()), Composite::AttentionLse(dims)].into_iter().chain(gradients).collect()
    }

    fn operands(&self, op: &Op) -> Vec<TensorType> {
        let rank = self.q.len();
        let with_last = |shape: &[usize], size: usize| f32s(&[&shape[..rank - 1], &[size]].concat());
        let (q, k, v) = (f32s(self.q), f32s(self.k), with_last(self.k, self.value_size));
        let rows = f32s(&self.q[..rank - 1]);
        let mut operands = match op {
            Op::Composite(Composite::AttentionLse(_)) => vec![q, k],
            Op::Composite(Composite::AttentionGradient { .. }) => {
                vec![q, k, v, with_last(self.q, self.value_size), rows.clone(), rows]
            }
            _ => vec![q, k, v],
        };
        operands.extend(self.mask.map(|(dtype, shape)| typed(dtype, shape)));
        operands
    }
}
