//! The rewrite rules.
//!
//! Every rule is directional: movement goes outward, to the results, where it meets other movement or an op that absorbs it;
//! constants go to the right; repeated work goes before the repetition. Nothing is associated or commuted at will, which would
//! explode. Each rule keeps values to within single-precision rounding.
//!
//! Letters: `x y z` tensors, `c d` constants that fill a tensor, `k` a scalar constant, `f o` functions, `p q r` permutations
//! or whatever the side condition computes, `s t u` shapes, `a b` axes, `n` no axes, `d e` ranges and pairings.

use super::contraction::*;
use super::movement::*;
use super::reduction::*;
use super::rewrite::{Condition, Rule};
use super::scalars::*;

pub const fn rule(name: &'static str, from: &'static str, when: Condition, to: &'static str) -> Rule {
    Rule { name, from, when, to }
}

#[rustfmt::skip]
pub const RULES: &[Rule] = &[
    // Movement that does nothing.
    rule("transpose-identity",       "(transpose ?p ?x)",                                   identity_permutation,     "?x"),
    rule("reshape-identity",         "(reshape ?s ?x)",                                     type_is_kept,             "?x"),
    rule("broadcast-identity",       "(broadcast ?s ?a ?x)",                                type_is_kept,             "?x"),
    rule("slice-identity",           "(slice ?d ?x)",                                       full_ranges,              "?x"),
    rule("cast-identity",            "(cast ?t ?x)",                                        type_is_kept,             "?x"),
    // Movement that merges.
    rule("transpose-transpose",      "(transpose ?p (transpose ?q ?x))",                    permutation_of_both,      "(transpose ?r ?x)"),
    rule("reshape-reshape",          "(reshape ?s (reshape ?t ?x))",                        always,                   "(reshape ?s ?x)"),
    rule("broadcast-broadcast",      "(broadcast ?s ?a (broadcast ?t ?b ?x))",              axes_of_both,             "(broadcast ?s ?r ?x)"),
    rule("slice-slice",              "(slice ?d (slice ?e ?x))",                            ranges_of_both,           "(slice ?r ?x)"),
    rule("cast-cast",                "(cast ?t (cast ?u ?x))",                              inner_cast_is_lossless,   "(cast ?t ?x)"),
    // Movement that is a simpler one.
    rule("transpose-as-reshape",     "(transpose ?p ?x)",                                   moves_unit_axes_only,     "(reshape ?r ?x)"),
    rule("broadcast-as-reshape",     "(broadcast ?s ?a ?x)",                                repeats_nothing,          "(reshape ?s ?x)"),
    rule("reduce-as-reshape",        "(reduce ?o ?a ?x)",                                   reduces_unit_axes_only,   "(reshape ?r ?x)"),
    // Movement past movement.
    rule("broadcast-of-reshape",     "(broadcast ?s ?a (reshape ?t ?x))",                   inserts_unit_axes_only,   "(broadcast ?s ?r ?x)"),
    rule("reshape-of-broadcast",     "(reshape ?s (broadcast ?t ?a ?x))",                   changes_unit_axes_only,   "(broadcast ?s ?r (reshape ?u ?x))"),
    rule("transpose-of-broadcast",   "(transpose ?p (broadcast ?t ?a ?x))",                 order_of_mapped_axes,     "(broadcast ?s ?b (transpose ?q ?x))"),
    rule("slice-of-broadcast",       "(slice ?d (broadcast ?t ?a ?x))",                     ranges_of_mapped_axes,    "(broadcast ?s ?a (slice ?e ?x))"),
    rule("slice-of-transpose",       "(slice ?d (transpose ?p ?x))",                        ranges_before_transpose,  "(transpose ?p (slice ?e ?x))"),
    // Pointwise ops before movement.
    rule("unary-of-transpose",       "(unary ?f (transpose ?p ?x))",                        always,                   "(transpose ?p (unary ?f ?x))"),
    rule("unary-of-reshape",         "(unary ?f (reshape ?s ?x))",                          always,                   "(reshape ?s (unary ?f ?x))"),
    rule("unary-of-broadcast",       "(unary ?f (broadcast ?s ?a ?x))",                     always,                   "(broadcast ?s ?a (unary ?f ?x))"),
    rule("cast-of-transpose",        "(cast ?t (transpose ?p ?x))",                         always,                   "(transpose ?p (cast ?t ?x))"),
    rule("cast-of-reshape",          "(cast ?t (reshape ?s ?x))",                           always,                   "(reshape ?s (cast ?t ?x))"),
    rule("cast-of-broadcast",        "(cast ?t (broadcast ?s ?a ?x))",                      always,                   "(broadcast ?s ?a (cast ?t ?x))"),
    rule("binary-of-transposes",     "(binary ?o (transpose ?p ?x) (transpose ?p ?y))",     always,                   "(transpose ?p (binary ?o ?x ?y))"),
    rule("binary-of-reshapes",       "(binary ?o (reshape ?s ?x) (reshape ?s ?y))",         equal_shapes,             "(reshape ?s (binary ?o ?x ?y))"),
    rule("binary-of-broadcasts",     "(binary ?o (broadcast ?s ?a ?x) (broadcast ?s ?a ?y))", always,                 "(broadcast ?s ?a (binary ?o ?x ?y))"),
    rule("transpose-by-constant",    "(binary ?o (transpose ?p ?x) ?c)",                    constant_like_x,          "(transpose ?p (binary ?o ?x (broadcast ?t ?n ?k)))"),
    rule("reshape-by-constant",      "(binary ?o (reshape ?s ?x) ?c)",                      constant_like_x,          "(reshape ?s (binary ?o ?x (broadcast ?t ?n ?k)))"),
    rule("broadcast-by-constant",    "(binary ?o (broadcast ?s ?a ?x) ?c)",                 constant_like_x,          "(broadcast ?s ?a (binary ?o ?x (broadcast ?t ?n ?k)))"),
    rule("constant-by-transpose",    "(binary ?o ?c (transpose ?p ?x))",                    constant_like_x,          "(transpose ?p (binary ?o (broadcast ?t ?n ?k) ?x))"),
    rule("constant-by-reshape",      "(binary ?o ?c (reshape ?s ?x))",                      constant_like_x,          "(reshape ?s (binary ?o (broadcast ?t ?n ?k) ?x))"),
    rule("constant-by-broadcast",    "(binary ?o ?c (broadcast ?s ?a ?x))",                 constant_like_x,          "(broadcast ?s ?a (binary ?o (broadcast ?t ?n ?k) ?x))"),
    rule("transpose-by-broadcast",   "(binary ?o (transpose ?p ?x) (broadcast ?s ?a ?y))",  order_before_transpose,   "(transpose ?p (binary ?o ?x (broadcast ?t ?b (transpose ?q ?y))))"),
    rule("broadcast-by-transpose",   "(binary ?o (broadcast ?s ?a ?y) (transpose ?p ?x))",  order_before_transpose,   "(transpose ?p (binary ?o (broadcast ?t ?b (transpose ?q ?y)) ?x))"),
    // Arithmetic with constants.
    rule("canonical-order",          "(binary ?o ?x ?y)",                                   commutes_into_order,      "(binary ?o ?y ?x)"),
    rule("add-zero",                 "(binary add ?x ?c)",                                  c_is_zero,                "?x"),
    rule("sub-zero",                 "(binary sub ?x ?c)",                                  c_is_zero,                "?x"),
    rule("sub-from-zero",            "(binary sub ?c ?x)",                                  c_is_zero,                "(unary neg ?x)"),
    rule("mul-one",                  "(binary mul ?x ?c)",                                  c_is_one,                 "?x"),
    rule("mul-zero",                 "(binary mul ?x ?c)",                                  c_is_integer_zero,        "?c"),
    rule("div-one",                  "(binary div ?x ?c)",                                  c_is_one,                 "?x"),
    rule("div-power-of-two",         "(binary div ?x ?c)",                                  reciprocal_is_exact,      "(binary mul ?x (broadcast ?t ?n ?k))"),
    rule("one-over",                 "(binary div ?c ?x)",                                  c_is_float_one,           "(unary reciprocal ?x)"),
    rule("mul-mul",                  "(binary mul (binary mul ?x ?c) ?d)",                  product_of_constants,     "(binary mul ?x (broadcast ?t ?n ?k))"),
    rule("div-of-mul",               "(binary div (binary mul ?x ?c) ?d)",                  quotient_c_over_d,        "(binary mul ?x (broadcast ?t ?n ?k))"),
    rule("mul-of-div",               "(binary mul (binary div ?x ?c) ?d)",                  quotient_d_over_c,        "(binary mul ?x (broadcast ?t ?n ?k))"),
    rule("neg-of-mul",               "(unary neg (binary mul ?x ?c))",                      negated_constant,         "(binary mul ?x (broadcast ?t ?n ?k))"),
    rule("mul-of-neg",               "(binary mul (unary neg ?x) ?c)",                      negated_constant,         "(binary mul ?x (broadcast ?t ?n ?k))"),
    rule("pow-one",                  "(binary pow ?x ?c)",                                  c_is_one,                 "?x"),
    rule("pow-two",                  "(binary pow ?x ?c)",                                  c_is_two,                 "(binary mul ?x ?x)"),
    rule("pow-three",                "(binary pow ?x ?c)",                                  c_is_three,               "(binary mul (binary mul ?x ?x) ?x)"),
    rule("pow-half",                 "(binary pow ?x ?c)",                                  c_is_half,                "(unary sqrt ?x)"),
    rule("pow-minus-half",           "(binary pow ?x ?c)",                                  c_is_minus_half,          "(unary rsqrt ?x)"),
    rule("pow-minus-one",            "(binary pow ?x ?c)",                                  c_is_minus_one_float,     "(unary reciprocal ?x)"),
    rule("select-constant-true",     "(select ?c ?x ?y)",                                   c_is_one,                 "?x"),
    rule("select-constant-false",    "(select ?c ?x ?y)",                                   c_is_zero,                "?y"),
    rule("select-same",              "(select ?z ?x ?x)",                                   always,                   "?x"),
    // Arithmetic.
    rule("involution",               "(unary ?f (unary ?f ?x))",                            f_undoes_itself,          "?x"),
    rule("idempotence",              "(unary ?f (unary ?f ?x))",                            f_repeats_itself,         "(unary ?f ?x)"),
    rule("sub-of-neg",               "(binary sub ?x (unary neg ?y))",                      always,                   "(binary add ?x ?y)"),
    rule("add-of-neg",               "(binary add ?x (unary neg ?y))",                      always,                   "(binary sub ?x ?y)"),
    rule("neg-plus",                 "(binary add (unary neg ?y) ?x)",                      always,                   "(binary sub ?x ?y)"),
    rule("neg-of-sub",               "(unary neg (binary sub ?x ?y))",                      always,                   "(binary sub ?y ?x)"),
    rule("reciprocal-of-sqrt",       "(unary reciprocal (unary sqrt ?x))",                  always,                   "(unary rsqrt ?x)"),
    rule("div-by-sqrt",              "(binary div ?y (unary sqrt ?x))",                     always,                   "(binary mul ?y (unary rsqrt ?x))"),
    // Reductions.
    rule("reduce-reduce",            "(reduce ?o ?a (reduce ?o ?b ?x))",                    axes_of_both_reductions,  "(reduce ?o ?r ?x)"),
    rule("reduce-of-transpose",      "(reduce ?o ?a (transpose ?p ?x))",                    axes_before_transpose,    "(transpose ?q (reduce ?o ?b ?x))"),
    rule("reduce-of-reshape",        "(reduce ?o ?a (reshape ?s ?x))",                      axes_before_reshape,      "(reshape ?r (reduce ?o ?b ?x))"),
    rule("extremum-of-broadcast",    "(reduce ?o ?a (broadcast ?s ?b ?x))",                 extremum_of_repeats,      "(broadcast ?r ?u (reduce ?o ?v ?x))"),
    rule("sum-of-broadcast",         "(reduce reduce_sum ?a (broadcast ?s ?b ?x))",         count_of_repeats,         "(binary mul (broadcast ?r ?u (reduce reduce_sum ?v ?x)) (broadcast ?r ?n ?k))"),
    rule("sum-of-scaled",            "(reduce reduce_sum ?a (binary mul ?x ?c))",           constant_like_result,     "(binary mul (reduce reduce_sum ?a ?x) (broadcast ?t ?n ?k))"),
    rule("sum-of-neg",               "(reduce reduce_sum ?a (unary neg ?x))",               always,                   "(unary neg (reduce reduce_sum ?a ?x))"),
    // Contractions.
    rule("dot-of-lhs-transpose",     "(dot ?d (transpose ?p ?x) ?y)",                       pairs_before_lhs_transpose, "(transpose ?r (dot ?e ?x ?y))"),
    rule("dot-of-rhs-transpose",     "(dot ?d ?x (transpose ?p ?y))",                       pairs_before_rhs_transpose, "(transpose ?r (dot ?e ?x ?y))"),
    rule("dot-of-lhs-broadcast",     "(dot ?d (broadcast ?s ?a ?x) ?y)",                    lhs_repeats_over_batch,   "(transpose ?r (dot ?e ?x ?y))"),
    rule("dot-of-rhs-broadcast",     "(dot ?d ?x (broadcast ?s ?a ?y))",                    rhs_repeats_over_batch,   "(transpose ?r (dot ?e ?x ?y))"),
    rule("dot-of-lhs-reshape",       "(dot ?d (reshape ?s ?x) ?y)",                         lhs_reshapes_free_axes,   "(reshape ?r (dot ?e ?x ?y))"),
    rule("dot-of-rhs-reshape",       "(dot ?d ?x (reshape ?s ?y))",                         rhs_reshapes_free_axes,   "(reshape ?r (dot ?e ?x ?y))"),
    rule("transpose-swaps-dot",      "(transpose ?p (dot ?d ?x ?y))",                       order_of_swapped_dot,     "(dot ?e ?y ?x)"),
    rule("transpose-of-dot-batch",   "(transpose ?p (dot ?d ?x ?y))",                       order_of_dot_batch,       "(dot ?e ?x ?y)"),
];
