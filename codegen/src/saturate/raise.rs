//! Raising: what exporters write in many nodes becomes the composite that it is, before derivatives are taken.

use std::sync::LazyLock;

use meganeura_ir::{Composite, Graph, Op, UnaryOp};

use super::attention::*;
use super::rewrite::{self, Rule};
use super::rules::{RULES, rule};
use super::{Limits, Rewrites, saturate_with};

/// Rules of the other table that raising needs.
const SHARED: [&str; 7] = [
    "transpose-identity",
    "reshape-identity",
    "broadcast-identity",
    "transpose-transpose",
    "reshape-reshape",
    "broadcast-broadcast",
    "broadcast-of-reshape",
];

/// All rules that raise.
pub fn raising() -> impl Iterator<Item = &'static Rule> {
    RULES.iter().filter(|r| SHARED.contains(&r.name)).chain(RAISE)
}

/// Letters as in the other table; in addition `v` values, `m` and `o` masks, `c` what is known of an attention.
#[rustfmt::skip]
pub const RAISE: &[Rule] = &[
    // Movement, so that what belongs together meets.
    rule("transpose-of-unit-reshape", "(transpose ?p (reshape ?s ?x))",                     order_before_unit_reshape, "(reshape ?t (transpose ?q ?x))"),
    rule("constant-factor-last",      "(binary mul ?k ?x)",                                 factor_goes_last,          "(binary mul ?x ?k)"),
    // Softmax.
    rule("softmax-of-quotient",       "(binary div (unary exp ?x) (broadcast ?s ?b (reduce reduce_sum ?a (unary exp ?x))))", quotient_by_sums, "(softmax ?r ?x)"),
    rule("softmax-of-shifted",        "(softmax ?a (binary sub ?x (broadcast ?s ?b ?y)))",  shift_repeats,             "(softmax ?a ?x)"),
    // Attention, from the weights of the values to the products of queries and keys.
    rule("attend",                    "(dot ?d (softmax ?a ?s) ?v)",                        weighs_values,             "(transpose ?r (attend ?c ?s (reshape ?t (transpose ?p ?v))))"),
    rule("attend-guarded",            "(dot ?d (select (unary is_nan (softmax ?a ?s)) ?z (softmax ?a ?s)) ?v)", weighs_values_guarded, "(transpose ?r (attend ?c ?s (reshape ?t (transpose ?p ?v))))"),
    rule("attend-reshaped",           "(attend ?c (reshape ?t ?s) ?v)",                     regroups_batch,            "(reshape ?u (attend ?c ?s (reshape ?w ?v)))"),
    rule("attend-bias",               "(attend ?c (binary add ?s ?m) ?v)",                  adds_bias,                 "(attend ?c ?s ?v (reshape ?t ?b))"),
    rule("attend-bias-first",         "(attend ?c (binary add ?m ?s) ?v)",                  adds_bias,                 "(attend ?c ?s ?v (reshape ?t ?b))"),
    rule("attend-mask",               "(attend ?c (select ?m ?s ?f) ?v)",                   keeps_scores,              "(attend ?c ?s ?v (reshape ?t ?b))"),
    rule("attend-finite-mask",        "(attend ?c (select ?m ?s ?f) ?v)",                   drowns_scores,             "(attend ?c ?s ?v (select (reshape ?t ?b) (broadcast ?t ?n ?z) (broadcast ?t ?n ?k)))"),
    rule("attend-second-bias",        "(attend ?c (binary add ?s ?m) ?v ?o)",               adds_second_bias,          "(attend ?c ?s ?v (binary add (broadcast ?u ?e (reshape ?t ?b)) (broadcast ?u ?g (reshape ?w ?o))))"),
    rule("attend-bias-below-mask",    "(attend ?c (binary add ?s ?m) ?v ?o)",               adds_bias_below_mask,      "(attend ?c ?s ?v (select (broadcast ?u ?g (reshape ?w ?o)) (broadcast ?u ?e (reshape ?t ?b)) (broadcast ?u ?n ?k)))"),
    rule("attend-mask-under-bias",    "(attend ?c (select ?m ?s ?f) ?v ?o)",                keeps_scores_under_bias,   "(attend ?c ?s ?v (select (broadcast ?u ?e (reshape ?t ?b)) (broadcast ?u ?g (reshape ?w ?o)) (broadcast ?u ?n ?k)))"),
    rule("attend-second-mask",        "(attend ?c (select ?m ?s ?f) ?v ?o)",                keeps_scores_twice,        "(attend ?c ?s ?v (binary and (broadcast ?u ?e (reshape ?t ?b)) (broadcast ?u ?g (reshape ?w ?o))))"),
    rule("attend-scaled",             "(attend ?c (binary mul ?s ?k) ?v)",                  factor_of_products,        "(attend ?e ?s ?v)"),
    rule("attend-scaled-masked",      "(attend ?c (binary mul ?s ?k) ?v ?m)",               factor_of_products,        "(attend ?e ?s ?v ?m)"),
    rule("attend-divided",            "(attend ?c (binary div ?s ?k) ?v)",                  divisor_of_products,       "(attend ?e ?s ?v)"),
    rule("attend-divided-masked",     "(attend ?c (binary div ?s ?k) ?v ?m)",               divisor_of_products,       "(attend ?e ?s ?v ?m)"),
    rule("attend-capped",             "(attend ?c (binary mul (unary tanh ?s) ?k) ?v)",     caps_scores,               "(attend ?e ?s ?v)"),
    rule("attend-capped-masked",      "(attend ?c (binary mul (unary tanh ?s) ?k) ?v ?m)",  caps_scores,               "(attend ?e ?s ?v ?m)"),
    rule("attend-scaled-query",        "(attend ?c (dot ?d (binary mul ?q ?k) ?y) ?v)",     factor_of_products,        "(attend ?e (dot ?d ?q ?y) ?v)"),
    rule("attend-scaled-query-masked", "(attend ?c (dot ?d (binary mul ?q ?k) ?y) ?v ?m)",  factor_of_products,        "(attend ?e (dot ?d ?q ?y) ?v ?m)"),
    rule("attend-scaled-key",          "(attend ?c (dot ?d ?q (binary mul ?y ?k)) ?v)",     factor_of_products,        "(attend ?e (dot ?d ?q ?y) ?v)"),
    rule("attend-scaled-key-masked",   "(attend ?c (dot ?d ?q (binary mul ?y ?k)) ?v ?m)",  factor_of_products,        "(attend ?e (dot ?d ?q ?y) ?v ?m)"),
    rule("attend-divided-query",       "(attend ?c (dot ?d (binary div ?q ?k) ?y) ?v)",     divisor_of_products,       "(attend ?e (dot ?d ?q ?y) ?v)"),
    rule("attend-divided-query-masked", "(attend ?c (dot ?d (binary div ?q ?k) ?y) ?v ?m)", divisor_of_products,       "(attend ?e (dot ?d ?q ?y) ?v ?m)"),
    rule("attention",                 "(attend ?c (dot ?d ?q ?k) ?v)",                      products_of_queries_and_keys, "(attention ?c (transpose ?p ?q) (reshape ?u (transpose ?w ?k)) ?v)"),
    rule("attention-masked",          "(attend ?c (dot ?d ?q ?k) ?v ?m)",                   products_of_queries_and_keys, "(attention ?c (transpose ?p ?q) (reshape ?u (transpose ?w ?k)) ?v ?m)"),
    rule("grouped-heads",             "(attention ?c ?q (reshape ?s (broadcast ?t ?a ?k)) (reshape ?u (broadcast ?w ?b ?v)))", grouped_heads, "(reshape ?r (attention ?c (reshape ?e ?q) (reshape ?f ?k) (reshape ?g ?v)))"),
    rule("grouped-heads-masked",      "(attention ?c ?q (reshape ?s (broadcast ?t ?a ?k)) (reshape ?u (broadcast ?w ?b ?v)) ?m)", grouped_heads, "(reshape ?r (attention ?c (reshape ?e ?q) (reshape ?f ?k) (reshape ?g ?v) (reshape ?o ?m)))"),
    rule("causal-mask",               "(attention ?c ?q ?k ?v ?m)",                         mask_is_causal,            "(attention ?e ?q ?k ?v)"),
    rule("mask-of-nothing",           "(attention ?c ?q ?k ?v ?m)",                         mask_keeps_everything,     "(attention ?c ?q ?k ?v)"),
];

/// `graph` with composites in the place of what exporters write for them; `graph` itself where nothing is found.
///
/// Inputs, parameters, outputs and updates keep their names and order; values agree to single-precision rounding. Equal graphs give equal
/// results.
pub fn raise(graph: &Graph) -> Graph {
    static REWRITES: LazyLock<Result<Rewrites, &'static str>> = LazyLock::new(|| rewrite::compile(raising()));
    let promising = graph.nodes().iter().any(|node| {
        matches!(node.op, Op::Composite(Composite::Softmax { .. } | Composite::Attention(_)) | Op::Unary(UnaryOp::Exp))
    });
    let raised = match &*REWRITES {
        Ok(rewrites) if promising => saturate_with(graph, &Limits::default(), rewrites).ok(),
        _ => None,
    };
    raised.map_or_else(|| graph.clone(), |(raised, _)| raised)
}
