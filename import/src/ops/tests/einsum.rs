//! Sums of products, determinants and norms.

use super::{Case, Input, case, plain};
use crate::testing::f32s;

pub(super) fn cases() -> Vec<Case> {
    [sums(), determinants(), norms()].into_iter().flatten().collect()
}

fn sums() -> Vec<Case> {
    let a = || Input(f32s(&[2, 2], &[1., 2., 3., 4.]));
    let b = || Input(f32s(&[2, 3], &[1., 0., 2., -1., 1., 1.]));
    let v = || Input(f32s(&[2], &[5., 7.]));
    let cube = || Input(f32s(&[2, 2, 2], &[1., 2., 3., 4., 5., 6., 7., 8.]));
    let einsum = |equation: &'static str, args, shape: &[usize], expected: &[f32]| {
        case("Einsum", 12, |n| n.string("equation", equation), args, vec![f32s(shape, expected)])
    };
    vec![
        einsum("ij,jk->ik", vec![a(), b()], &[2, 3], &[-1., 2., 4., -1., 4., 10.]),
        einsum(" i j , j k -> k i ", vec![a(), b()], &[3, 2], &[-1., -1., 2., 4., 4., 10.]),
        // The result that nobody names is in alphabetical order.
        einsum("ba", vec![a()], &[2, 2], &[1., 3., 2., 4.]),
        einsum("ii", vec![a()], &[], &[5.]),
        einsum("ii->i", vec![a()], &[2], &[1., 4.]),
        einsum("...ii->...i", vec![cube()], &[2, 2], &[1., 4., 5., 8.]),
        einsum("iii->i", vec![cube()], &[2], &[1., 8.]),
        einsum("ij->", vec![a()], &[], &[10.]),
        einsum("i,j->ji", vec![v(), v()], &[2, 2], &[25., 35., 35., 49.]),
        einsum("i,ij,j", vec![v(), a(), v()], &[], &[396.]),
        einsum("...a,...a->...", vec![cube(), v()], &[2, 2], &[19., 43., 67., 91.]),
        einsum("b...,b->...b", vec![cube(), v()], &[2, 2, 2], &[5., 35., 10., 42., 15., 49., 20., 56.]),
        // An axis of size 1 repeats.
        einsum("ij,jk->ik", vec![Input(f32s(&[1, 1], &[2.])), b()], &[1, 3], &[0., 2., 6.]),
        einsum("ab,ab->ab", vec![a(), Input(f32s(&[1, 2], &[1., 10.]))], &[2, 2], &[1., 20., 3., 40.]),
        einsum("ii->i", vec![Input(f32s(&[1, 1], &[3.]))], &[1], &[3.]),
        einsum("ij,jk->ik", vec![Input(f32s(&[1, 0], &[])), Input(f32s(&[0, 2], &[]))], &[1, 2], &[0., 0.]),
        einsum(",i->i", vec![Input(f32s(&[], &[2.])), v()], &[2], &[10., 14.]),
    ]
}

fn determinants() -> Vec<Case> {
    #[rustfmt::skip]
    let five = [
        2., 0., 1., 3., 1.,
        1., 1., 0., 0., 2.,
        0., 2., 4., 1., 0.,
        5., 1., 0., 1., 1.,
        1., 0., 2., 0., 3.,
    ];
    let exchanged = [0., 1., 0., 0., 0., 1., 0., 0., 0., 0., 0., 0., 1., 0., 0., 0., 0., 0., 0., 2., 0., 0., 0., 3., 0.];
    let matrices = |n: usize, values: &[f32]| Input(f32s(&[values.len() / (n * n), n, n], values));
    vec![
        plain("Det", 11, vec![Input(f32s(&[2, 2], &[1., 2., 3., 4.]))], f32s(&[], &[-2.])),
        plain("Det", 11, vec![matrices(1, &[3., -4.])], f32s(&[2], &[3., -4.])),
        plain("Det", 22, vec![matrices(3, &[2., 0., 1., 1., 3., 2., 0., 1., 1.])], f32s(&[1], &[3.])),
        plain(
            "Det",
            22,
            vec![matrices(4, &[1., 2., 0., 1., 0., 3., 1., 2., 4., 0., 1., 1., 2., 1., 1., 0.])],
            f32s(&[1], &[-14.]),
        ),
        plain("Det", 22, vec![matrices(5, &five)], f32s(&[1], &[-229.])),
        plain("Det", 22, vec![matrices(5, &exchanged)], f32s(&[1], &[6.])),
        plain("Det", 22, vec![matrices(5, &[1.; 25])], f32s(&[1], &[0.])),
    ]
}

fn norms() -> Vec<Case> {
    let x = || Input(f32s(&[2, 2], &[3., -4., 0., 0.]));
    vec![
        plain("LpNormalization", 22, vec![x()], f32s(&[2, 2], &[0.6, -0.8, 0., 0.])),
        case("LpNormalization", 7, |n| n.int("p", 1), vec![x()], vec![f32s(&[2, 2], &[3. / 7., -4. / 7., 0., 0.])]),
        case("LpNormalization", 7, |n| n.int("axis", 0), vec![x()], vec![f32s(&[2, 2], &[1., -1., 0., 0.])]),
        case(
            "MeanVarianceNormalization",
            13,
            |n| n.ints("axes", &[-1]),
            vec![Input(f32s(&[2, 2], &[2., 6., 5., 5.]))],
            vec![f32s(&[2, 2], &[-1., 1., 0., 0.])],
        ),
        plain("MeanVarianceNormalization", 9, vec![Input(f32s(&[2, 1, 1, 1], &[-3., 7.]))], f32s(&[2, 1, 1, 1], &[-1., 1.])),
    ]
}
