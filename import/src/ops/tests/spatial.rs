use meganeura_ir::{DType, Tensor};

use super::{Absent, Case, Input, Known, case, plain};
use crate::testing::{NodeBuilder, f32s, i64s};

pub(super) fn cases() -> Vec<Case> {
    [resizing(), sampling(), regions(), rearranging(), pooling(), normalizing()].into_iter().flatten().collect()
}

fn line(values: &[f32]) -> Tensor {
    f32s(&[1, 1, values.len()], values)
}

fn k(values: &[i64]) -> super::Arg {
    Known(i64s(&[values.len()], values))
}

fn scales(values: &[f32]) -> super::Arg {
    Known(f32s(&[values.len()], values))
}

fn resizing() -> Vec<Case> {
    let two = || Input(line(&[1., 2.]));
    let four = || Input(line(&[1., 2., 3., 4.]));
    let impulse = || Input(line(&[0., 0., 1., 0.]));
    let linear = |n: NodeBuilder| n.string("mode", "linear");
    let transform = |name: &'static str| move |n: NodeBuilder| n.string("coordinate_transformation_mode", name);
    let to = |x: super::Arg, size: i64| vec![x, Absent, Absent, k(&[1, 1, size])];
    vec![
        case("Resize", 13, linear, vec![two(), Absent, scales(&[1., 1., 2.])], vec![line(&[1., 1.25, 1.75, 2.])]),
        // What has no weight does not count, infinite or not.
        case(
            "Resize",
            13,
            linear,
            vec![Input(line(&[f32::INFINITY, 1., 2., 3.])), Absent, scales(&[1., 1., 1.5])],
            vec![line(&[f32::INFINITY, f32::INFINITY, 1. + 1. / 6., 1. + 5. / 6., 2.5, 3.])],
        ),
        case("Resize", 10, linear, vec![two(), scales(&[1., 1., 2.])], vec![line(&[1., 1.5, 2., 2.])]),
        case("Resize", 13, |n| transform("align_corners")(linear(n)), to(two(), 4), vec![line(&[1., 4. / 3., 5. / 3., 2.])]),
        case("Resize", 13, |n| transform("pytorch_half_pixel")(linear(n)), to(four(), 1), vec![line(&[1.])]),
        // 4 * 0.6 = 2.4 elements, centred in those of the operand: positions 1/2 and 2 + 1/6.
        case(
            "Resize",
            19,
            |n| transform("half_pixel_symmetric")(linear(n)),
            vec![four(), Absent, scales(&[1., 1., 0.6])],
            vec![line(&[1. + 2. / 3., 3. + 1. / 3.])],
        ),
        case(
            "Resize",
            13,
            |n| transform("asymmetric")(n).string("mode", "cubic"),
            to(impulse(), 8),
            vec![line(&[0., -0.09375, 0., 0.59375, 1., 0.59375, 0., -0.09375])],
        ),
        // The weights of the three elements inside are -0.0625, 0.5625 and 0.5625.
        case(
            "Resize",
            13,
            |n| transform("asymmetric")(n).string("mode", "cubic").float("cubic_coeff_a", -0.5).int("exclude_outside", 1),
            vec![Input(line(&[1., 0., 0.])), Absent, Absent, k(&[1, 1, 6])],
            vec![line(&[1., 0.5625 / 1.0625, 0., -0.0625 / 1.0625, 0., 0.])],
        ),
        case("Resize", 18, |n| linear(n).int("antialias", 1), to(four(), 2), vec![line(&[1.625, 3.375])]),
        case(
            "Resize",
            18,
            |n| linear(n).int("antialias", 1).int("exclude_outside", 1),
            to(four(), 2),
            vec![line(&[3. / 1.75, 5. - 3. / 1.75])],
        ),
        case(
            "Resize",
            18,
            |n| transform("tf_crop_and_resize")(linear(n)).float("extrapolation_value", 9.0).ints("axes", &[-1]),
            vec![four(), Known(f32s(&[2], &[0.5, 1.5])), Absent, k(&[3])],
            vec![line(&[2.5, 4., 9.])],
        ),
        case(
            "Resize",
            18,
            |n| n.string("keep_aspect_ratio_policy", "not_larger").ints("axes", &[1, 0]),
            vec![Input(f32s(&[2, 4], &[1., 2., 3., 4., 5., 6., 7., 8.])), Absent, Absent, k(&[2, 4])],
            vec![f32s(&[1, 2], &[1., 3.])],
        ),
        case(
            "Resize",
            18,
            |n| n.string("keep_aspect_ratio_policy", "not_smaller"),
            vec![Input(f32s(&[1, 2], &[1., 2.])), Absent, Absent, k(&[2, 3])],
            vec![f32s(&[2, 4], &[1., 1., 2., 2., 1., 1., 2., 2.])],
        ),
        case(
            "Resize",
            13,
            |n| transform("asymmetric")(n).string("nearest_mode", "ceil"),
            vec![Input(Tensor::from_i64(DType::U8, [1, 1, 4], &[1, 2, 3, 4])), Absent, Absent, k(&[1, 1, 2])],
            vec![Tensor::from_i64(DType::U8, [1, 1, 2], &[1, 3])],
        ),
        plain("Resize", 13, vec![Input(f32s(&[0, 2], &[])), Absent, Absent, k(&[0, 4])], f32s(&[0, 4], &[])),
        case("Upsample", 9, linear, vec![two(), scales(&[1., 1., 2.])], vec![line(&[1., 1.5, 2., 2.])]),
        case("Upsample", 7, |n| n.floats("scales", &[1., 1., 2.]), vec![two()], vec![line(&[1., 1., 2., 2.])]),
    ]
}

fn sampling() -> Vec<Case> {
    let image = || Input(f32s(&[1, 1, 2, 2], &[1., 2., 3., 4.]));
    // The middle, the upper right corner, and as far again to its right.
    let grid = || Input(f32s(&[1, 1, 3, 2], &[0., 0., 1., -1., 3., -1.]));
    let result = |values: &[f32]| vec![f32s(&[1, 1, 1, values.len()], values)];
    let corners = |n: NodeBuilder| n.int("align_corners", 1);
    let padding = |name: &'static str| move |n: NodeBuilder| n.string("padding_mode", name);
    let theta = || Input(f32s(&[1, 2, 3], &[2., 0., 1., 0., 3., -1.]));
    vec![
        case("GridSample", 20, corners, vec![image(), grid()], result(&[2.5, 2., 0.])),
        case("GridSample", 20, |n| padding("border")(corners(n)), vec![image(), grid()], result(&[2.5, 2., 2.])),
        case("GridSample", 20, |n| padding("reflection")(corners(n)), vec![image(), grid()], result(&[2.5, 2., 1.])),
        // Corners lie half an element outside the centres: half of element 2 and half of nothing, on both axes.
        case("GridSample", 16, |n| n.string("mode", "bilinear"), vec![image(), grid()], result(&[2.5, 0.5, 0.])),
        case("GridSample", 20, |n| n.string("mode", "nearest"), vec![image(), grid()], result(&[1., 0., 0.])),
        // Positions 1.5 and, with the corners of four elements, 3.5 which mirrors to itself.
        case(
            "GridSample",
            20,
            |n| padding("reflection")(n).string("mode", "cubic"),
            vec![Input(line(&[0., 0., 1., 0.])), Input(f32s(&[1, 2, 1], &[0., 1.]))],
            vec![line(&[0.59375, -0.09375 * 2.])],
        ),
        case(
            "GridSample",
            20,
            corners,
            vec![Input(f32s(&[1, 1, 2, 1, 2], &[1., 2., 3., 4.])), Input(f32s(&[1, 1, 1, 1, 3], &[0.5, 0., -0.5]))],
            vec![f32s(&[1, 1, 1, 1, 1], &[2.25])],
        ),
        plain("AffineGrid", 20, vec![theta(), k(&[1, 1, 2, 2])], f32s(&[1, 2, 2, 2], &[0., -2.5, 2., -2.5, 0., 0.5, 2., 0.5])),
        case("AffineGrid", 20, corners, vec![theta(), k(&[1, 1, 2, 1])], vec![f32s(&[1, 2, 1, 2], &[1., -4., 1., 2.])]),
        // Every element is read half a row below; the last row is half outside.
        case(
            "DeformConv",
            19,
            |n| n,
            vec![
                image(),
                Input(f32s(&[1, 1, 1, 1], &[2.])),
                Input(f32s(&[1, 2, 2, 2], &[0.5, 0.5, 0.5, 0.5, 0., 0., 0., 0.])),
                Known(f32s(&[1], &[10.])),
                Input(f32s(&[1, 1, 2, 2], &[1., 0., 1., 0.5])),
            ],
            vec![f32s(&[1, 1, 2, 2], &[14., 10., 13., 12.])],
        ),
        // Two groups with offsets of their own, on one spatial axis.
        case(
            "DeformConv",
            22,
            |n| n.int("group", 2).int("offset_group", 2),
            vec![
                Input(f32s(&[1, 2, 3], &[1., 2., 3., 4., 5., 6.])),
                Input(f32s(&[2, 1, 2], &[1., 1., 1., -1.])),
                Input(f32s(&[1, 4, 2], &[0., 0., 0.5, 0.5, -1., 0., 0., 0.])),
            ],
            // 1 + 2.5, 2 + 3/2, 0 - 5, 5 - 6
            vec![f32s(&[1, 2, 2], &[3.5, 3.5, -5., -1.])],
        ),
    ]
}

fn regions() -> Vec<Case> {
    let image = || Input(f32s(&[1, 1, 2, 2], &[0., 1., 2., 5.]));
    let first = || Input(i64s(&[1], &[0]));
    let roi = |edges: &[f32]| Input(f32s(&[1, 4], edges));
    let result = |value: f32| vec![f32s(&[1, 1, 1, 1], &[value])];
    let samples = |count: i64| move |n: NodeBuilder| n.int("sampling_ratio", count);
    vec![
        // The middle of the region is the middle of element (1, 1), or of the image.
        case("RoiAlign", 10, samples(1), vec![image(), roi(&[0., 0., 2., 2.]), first()], result(5.)),
        case("RoiAlign", 16, samples(1), vec![image(), roi(&[0., 0., 2., 2.]), first()], result(2.)),
        // Half of the samples lie beyond the right edge.
        case("RoiAlign", 16, samples(2), vec![image(), roi(&[0., 0., 4., 2.]), first()], result(1.)),
        case("RoiAlign", 16, samples(2), vec![image(), roi(&[10., 10., 12., 12.]), first()], result(0.)),
        case(
            "RoiAlign",
            16,
            |n| samples(1)(n).string("mode", "max"),
            vec![image(), roi(&[0., 0., 2., 2.]), first()],
            result(1.25),
        ),
        // One sample per element: 2 x 2 in the first region, none in the second.
        case(
            "RoiAlign",
            16,
            |n| n.float("spatial_scale", 0.5),
            vec![image(), Known(f32s(&[2, 4], &[0., 0., 4., 4., 3., 3., 3., 3.])), Input(i64s(&[2], &[0, 0]))],
            vec![f32s(&[2, 1, 1, 1], &[2., 0.])],
        ),
        case(
            "RoiAlign",
            16,
            |n| n.string("mode", "max"),
            vec![image(), Known(f32s(&[2, 4], &[0., 0., 2., 2., 0., 0., 1., 1.])), Input(i64s(&[2], &[0, 0]))],
            vec![f32s(&[2, 1, 1, 1], &[5., 0.])],
        ),
        case(
            "MaxRoiPool",
            7,
            |n| n.ints("pooled_shape", &[2, 2]),
            vec![
                Input(f32s(&[1, 1, 3, 3], &[1., 2., 3., 4., 5., 6., 7., 8., 9.])),
                Input(f32s(&[3, 5], &[0., 0., 0., 2., 2., 0., 1., 1., 1., 1., 0., 8., 8., 9., 9.])),
            ],
            vec![f32s(&[3, 1, 2, 2], &[5., 6., 8., 9., 5., 5., 5., 5., 0., 0., 0., 0.])],
        ),
    ]
}

fn rearranging() -> Vec<Case> {
    let channels = || Input(f32s(&[1, 8, 1, 1], &[0., 1., 2., 3., 4., 5., 6., 7.]));
    let image = |values: &[f32]| f32s(&[1, 2, 2, 2], values);
    let block = |n: NodeBuilder| n.int("blocksize", 2);
    let four = || Input(f32s(&[1, 4], &[1., 2., 3., 4.]));
    vec![
        case("DepthToSpace", 13, block, vec![channels()], vec![image(&[0., 2., 4., 6., 1., 3., 5., 7.])]),
        case(
            "DepthToSpace",
            11,
            |n| block(n).string("mode", "CRD"),
            vec![channels()],
            vec![image(&[0., 1., 2., 3., 4., 5., 6., 7.])],
        ),
        case(
            "SpaceToDepth",
            13,
            block,
            vec![Input(image(&[0., 2., 4., 6., 1., 3., 5., 7.]))],
            vec![f32s(&[1, 8, 1, 1], &[0., 1., 2., 3., 4., 5., 6., 7.])],
        ),
        plain("CenterCropPad", 18, vec![four(), k(&[1, 3])], f32s(&[1, 3], &[1., 2., 3.])),
        plain("CenterCropPad", 18, vec![four(), k(&[2, 2])], f32s(&[2, 2], &[2., 3., 0., 0.])),
        case(
            "CenterCropPad",
            18,
            |n| n.ints("axes", &[-1]),
            vec![four(), k(&[7])],
            vec![f32s(&[1, 7], &[0., 1., 2., 3., 4., 0., 0.])],
        ),
        plain("Col2Im", 18, vec![Input(f32s(&[1, 2, 2], &[1., 2., 3., 4.])), k(&[3]), k(&[2])], line(&[1., 5., 4.])),
        case(
            "Col2Im",
            18,
            |n| n.ints("pads", &[1, 0]).ints("strides", &[2]),
            vec![Input(f32s(&[1, 2, 2], &[1., 2., 3., 4.])), k(&[3]), k(&[2])],
            vec![line(&[3., 2., 4.])],
        ),
    ]
}

fn pooling() -> Vec<Case> {
    let k2 = |n: NodeBuilder| n.ints("kernel_shape", &[2]);
    let k22 = |n: NodeBuilder| n.ints("kernel_shape", &[2, 2]);
    let image = || Input(f32s(&[1, 1, 2, 3], &[1., 5., 2., 9., 3., 5.]));
    let maxima = || f32s(&[1, 1, 1, 2], &[9., 5.]);
    let at = |values: &[i64]| i64s(&[1, 1, 1, 2], values);
    let legs = || Input(line(&[3., -4., 0.]));
    vec![
        // Of the two fives the first counts.
        case("MaxPool", 12, k22, vec![image()], vec![maxima(), at(&[3, 1])]),
        case("MaxPool", 12, |n| k22(n).int("storage_order", 1), vec![image()], vec![maxima(), at(&[1, 2])]),
        case(
            "MaxPool",
            12,
            |n| k2(n).ints("pads", &[1, 1]).ints("strides", &[2]),
            vec![Input(Tensor::from_i64(DType::U8, [1, 2, 2], &[0, 0, 0, 7]))],
            vec![Tensor::from_i64(DType::U8, [1, 2, 2], &[0, 0, 0, 7]), i64s(&[1, 2, 2], &[0, 1, 2, 3])],
        ),
        case("LpPool", 18, k2, vec![legs()], vec![line(&[5., 4.])]),
        case("LpPool", 11, |n| k2(n).int("p", 1).ints("pads", &[1, 0]), vec![legs()], vec![line(&[3., 7., 4.])]),
        case("LpPool", 18, |n| k2(n).int("p", 3), vec![legs()], vec![line(&[91f32.cbrt(), 4.])]),
        case("GlobalLpPool", 7, |n| n, vec![legs()], vec![line(&[5.])]),
        case(
            "MaxUnpool",
            11,
            |n| k2(n).ints("strides", &[2]),
            vec![Input(line(&[7., 8.])), Input(i64s(&[1, 1, 2], &[1, 2]))],
            vec![line(&[0., 7., 8., 0.])],
        ),
        case(
            "MaxUnpool",
            11,
            |n| k2(n).ints("strides", &[2]),
            vec![Input(line(&[7., 8.])), Input(i64s(&[1, 1, 2], &[1, 2])), k(&[1, 1, 5])],
            vec![line(&[0., 7., 8., 0., 0.])],
        ),
    ]
}

fn normalizing() -> Vec<Case> {
    let one = |value: f32| Input(f32s(&[1], &[value]));
    let training = |n: NodeBuilder| n.float("epsilon", 0.0).float("momentum", 0.5);
    let batch = || vec![Input(f32s(&[2, 1], &[1., 3.])), one(2.), one(1.), one(10.), one(4.)];
    let trained = || vec![f32s(&[2, 1], &[-1., 3.]), f32s(&[1], &[6.]), f32s(&[1], &[2.5])];
    let response = |size: i64| move |n: NodeBuilder| n.int("size", size).float("alpha", size as f32).float("beta", 1.0);
    let channels = || Input(f32s(&[1, 3, 1], &[1., 2., 3.]));
    vec![
        case("BatchNormalization", 15, |n| training(n).int("training_mode", 1), batch(), trained()),
        case("BatchNormalization", 9, training, batch(), trained()),
        // Statistics of single elements.
        case(
            "BatchNormalization",
            7,
            |n| n.float("epsilon", 0.0).int("spatial", 0),
            vec![
                Input(f32s(&[1, 1, 2], &[1., 3.])),
                Input(f32s(&[1, 2], &[1., 2.])),
                Input(f32s(&[1, 2], &[0., 1.])),
                Input(f32s(&[1, 2], &[3., 1.])),
                Input(f32s(&[1, 2], &[1., 4.])),
            ],
            vec![f32s(&[1, 1, 2], &[-2., 3.])],
        ),
        case("LRN", 13, response(3), vec![channels()], vec![f32s(&[1, 3, 1], &[1. / 6., 2. / 15., 3. / 14.])]),
        case("LRN", 7, response(2), vec![channels()], vec![f32s(&[1, 3, 1], &[1. / 6., 2. / 14., 3. / 10.])]),
    ]
}
