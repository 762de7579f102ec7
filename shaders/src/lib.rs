//! WGSL helper functions that generated kernels call. Each file holds one function and states its error.
//!
//! To add one: a file in `helpers/` and a row in the table.

/// A WGSL function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Helper {
    pub name: &'static str,
    pub source: &'static str,
    /// Names of the helpers that it calls.
    pub needs: &'static [&'static str],
}

macro_rules! helpers {
    ($($name:literal $needs:expr),* $(,)?) => {
        /// Every helper, those without needs first.
        pub const HELPERS: &[Helper] = &[
            $(Helper { name: $name, source: include_str!(concat!("helpers/", $name, ".wgsl")), needs: &$needs }),*
        ];
    };
}

helpers! {
    "f32_bits"   [],
    "is_nan"     [],
    "is_inf"     [],
    "max_f32"    ["is_nan"],
    "min_f32"    ["is_nan"],
    "div_f32"    [],
    "rem_f32"    [],
    "pow_f32"    ["f32_bits"],
    "sin_cos"    [],
    "asin_f32"   [],
    "acos_f32"   ["asin_f32"],
    "atan_f32"   [],
    "tanh_f32"   [],
    "sinh_f32"   [],
    "asinh_f32"  [],
    "atanh_f32"  [],
    "sigmoid"    [],
    "log1p_f32"  [],
    "softplus"   ["log1p_f32"],
    "erf"        [],
    "round_f16"  ["f32_bits"],
    "round_bf16" ["is_nan"],
    "div_i32"    [],
    "rem_i32"    [],
    "pow_i32"    [],
    "div_u32"    [],
    "rem_u32"    [],
    "pow_u32"    [],
    "mul_high"   [],
    "random_uniform" ["mul_high"],
}

/// The helper named `name`.
pub fn helper(name: &str) -> Option<&'static Helper> {
    HELPERS.iter().find(|h| h.name == name)
}
