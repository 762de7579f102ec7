//! How a row of the rule table becomes a rewrite: match, check the side condition, bind what it computes, build, merge.

use std::str::FromStr;
use std::sync::LazyLock;

use egg::{Applier, ENodeOrVar, Id, Language, Pattern, PatternAst, RecExpr, Rewrite, Subst, Symbol, Var};
use meganeura_ir::{AttentionDims, BinaryOp, DType, DotDims, ReduceOp, Shape, SliceDim, TensorType, UnaryOp};

use super::analysis::{Fact, Facts, TensorGraph, attribute, splat, tensor_type};
use super::language::{Attr, Scalar, TensorLang};

/// A directional rule: where `from` matches and `when` holds, the same class is also `to`.
pub struct Rule {
    pub name: &'static str,
    pub from: &'static str,
    pub when: Condition,
    pub to: &'static str,
}

/// A side condition: `None` refuses the match, otherwise the leaves that `to` uses beyond the variables of `from`.
pub type Condition = fn(&Match) -> Option<Bindings>;

/// Variables, by their letter, and the leaves that they stand for.
pub type Bindings = Vec<(char, TensorLang)>;

/// A match of a rule's left side. Variables go by their letter: `x` is `?x`.
pub struct Match<'a> {
    egraph: &'a TensorGraph,
    root: Id,
    subst: &'a Subst,
}

macro_rules! attributes {
    ($($name:ident: $variant:ident -> $t:ty;)*) => {
        $(pub fn $name(&self, variable: char) -> Option<&'a $t> {
            match attribute(self.egraph, self.class(variable)?)? {
                Attr::$variant(a) => Some(a),
                _ => None,
            }
        })*
    };
}

impl<'a> Match<'a> {
    attributes! {
        unary: Unary -> UnaryOp;
        binary: Binary -> BinaryOp;
        reduction: Reduce -> ReduceOp;
        dtype: DType -> DType;
        shape: Shape -> Shape;
        axes: Axes -> Vec<usize>;
        ranges: Slice -> Vec<SliceDim>;
        dot: Dot -> DotDims;
        attention: Attention -> AttentionDims;
    }

    pub fn egraph(&self) -> &'a TensorGraph {
        self.egraph
    }

    /// The ways in which a tensor is computed.
    pub fn nodes(&self, variable: char) -> Option<&'a [TensorLang]> {
        Some(&self.egraph[self.class(variable)?].nodes)
    }

    /// An e-node that stands for its class where it is bound.
    pub fn representative(&self, class: Id) -> Option<TensorLang> {
        self.egraph[class].nodes.first().cloned()
    }

    pub fn axes_of(&self, class: Id) -> Option<&'a Vec<usize>> {
        match attribute(self.egraph, class)? {
            Attr::Axes(a) => Some(a),
            _ => None,
        }
    }

    pub fn attribute(&self, variable: char) -> Option<&'a Attr> {
        attribute(self.egraph, self.class(variable)?)
    }

    /// The type of the whole match.
    pub fn result(&self) -> Option<&'a TensorType> {
        tensor_type(self.egraph, self.root)
    }

    pub fn ty(&self, variable: char) -> Option<&'a TensorType> {
        tensor_type(self.egraph, self.class(variable)?)
    }

    /// The sizes of a tensor.
    pub fn sizes(&self, variable: char) -> Option<&'a Shape> {
        self.ty(variable).map(|t| &t.shape)
    }

    /// The constant that fills a tensor.
    pub fn splat(&self, variable: char) -> Option<Scalar> {
        splat(self.egraph, self.class(variable)?)
    }

    /// The value of the constant that fills a tensor.
    pub fn value(&self, variable: char) -> Option<f64> {
        self.splat(variable).map(Scalar::value)
    }

    pub fn class(&self, variable: char) -> Option<Id> {
        self.subst.get(var(variable)?).map(|&id| self.egraph.find(id))
    }
}

/// The variable of a lower-case letter.
fn var(letter: char) -> Option<Var> {
    static VARS: LazyLock<Vec<Option<Var>>> = LazyLock::new(|| ('a'..='z').map(|c| format!("?{c}").parse().ok()).collect());
    VARS.get((letter as usize).checked_sub('a' as usize)?).copied().flatten()
}

/// The right side of a rule with its side condition.
struct Build {
    when: Condition,
    to: PatternAst<TensorLang>,
}

impl Applier<TensorLang, Facts> for Build {
    fn apply_one(
        &self,
        egraph: &mut TensorGraph,
        root: Id,
        subst: &Subst,
        _: Option<&PatternAst<TensorLang>>,
        _: Symbol,
    ) -> Vec<Id> {
        let Some(bindings) = (self.when)(&Match { egraph, root, subst }) else { return Vec::new() };
        let mut subst = subst.clone();
        for (letter, leaf) in bindings {
            let Some(variable) = var(letter) else { return Vec::new() };
            let leaf = egraph.add(leaf);
            subst.insert(variable, leaf);
        }
        let Some(built) = instantiate(egraph, &self.to, &subst) else { return Vec::new() };
        let same = match (&egraph[built].data, &egraph[root].data) {
            (Fact::Tensor { ty: built, .. }, Fact::Tensor { ty: root, .. }) => {
                debug_assert_eq!(built, root, "a rule changed a type");
                built == root
            }
            // A rank beyond the limit.
            _ => false,
        };
        if same && egraph.union(root, built) { vec![root] } else { Vec::new() }
    }
}

/// Adds the pattern. Movement that moves nothing and reductions of no axis are left out.
fn instantiate(egraph: &mut TensorGraph, ast: &PatternAst<TensorLang>, subst: &Subst) -> Option<Id> {
    let mut ids: Vec<Id> = Vec::with_capacity(ast.len());
    for node in ast {
        let id = match node {
            ENodeOrVar::Var(v) => *subst.get(*v)?,
            ENodeOrVar::ENode(n) => {
                let node = n.clone().map_children(|c| ids[usize::from(c)]);
                match moved_operand(egraph, &node) {
                    Some(operand) => operand,
                    None => egraph.add(node),
                }
            }
        };
        ids.push(id);
    }
    ids.last().copied()
}

/// The operand of a movement or a reduction that returns it unchanged.
fn moved_operand(egraph: &TensorGraph, node: &TensorLang) -> Option<Id> {
    let &[operand] = node.operands() else { return None };
    let shape = &tensor_type(egraph, operand)?.shape;
    let first = attribute(egraph, *node.attributes().first()?)?;
    let unchanged = match (node, first) {
        (TensorLang::Transpose(_), Attr::Axes(p)) => p.iter().copied().eq(0..shape.rank()),
        (TensorLang::Reshape(_) | TensorLang::Broadcast(_), Attr::Shape(s)) => s == shape,
        (TensorLang::Slice(_), Attr::Slice(ranges)) => is_full(ranges, shape),
        (TensorLang::Reduce([_, axes, _]), _) => matches!(attribute(egraph, *axes), Some(Attr::Axes(a)) if a.is_empty()),
        _ => false,
    };
    unchanged.then_some(operand)
}

/// Whether a slice takes everything in order.
pub fn is_full(ranges: &[SliceDim], shape: &Shape) -> bool {
    ranges.iter().zip(shape.iter()).all(|(r, &d)| r.size == d && (d == 0 || r.start == 0 && (d == 1 || r.step == 1)))
}

/// The rewrites of a rule table, in its order.
///
/// # Errors
/// The name of a rule whose patterns do not parse or whose right side has a variable that nothing binds.
pub fn compile<'r>(rules: impl IntoIterator<Item = &'r Rule>) -> Result<Vec<Rewrite<TensorLang, Facts>>, &'static str> {
    let compiled = rules.into_iter().map(|rule| {
        let from = Pattern::from_str(rule.from).map_err(|_| rule.name)?;
        let to = RecExpr::from_str(rule.to).map_err(|_| rule.name)?;
        Rewrite::new(rule.name, from, Build { when: rule.when, to }).map_err(|_| rule.name)
    });
    compiled.collect()
}
