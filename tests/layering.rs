//! Which crate of the workspace may depend on which, and which single crate knows each heavyweight dependency.

use std::process::Command;

use serde_json::Value;

/// A crate, and the crates of the workspace that its code may use. Tests may use more.
const LAYERS: &[(&str, &[&str])] = &[
    ("meganeura-ir", &[]),
    ("meganeura-shaders", &[]),
    ("meganeura-import", &["meganeura-ir"]),
    ("meganeura-autodiff", &["meganeura-ir"]),
    ("meganeura-codegen", &["meganeura-ir", "meganeura-shaders"]),
    ("meganeura-runtime", &["meganeura-ir", "meganeura-codegen"]),
    ("meganeura-serve", &["meganeura-ir"]),
    (
        "meganeura",
        &["meganeura-ir", "meganeura-import", "meganeura-autodiff", "meganeura-codegen", "meganeura-runtime", "meganeura-serve"],
    ),
    ("conformance", &["meganeura-ir", "meganeura-import", "meganeura-autodiff", "meganeura-codegen", "meganeura-runtime"]),
    ("fuzz", &["meganeura-ir", "meganeura-import"]),
    ("xtask", &[]),
];

/// A dependency from outside, and the only crates whose code may use it.
const CONFINED: &[(&str, &[&str])] = &[
    ("prost", &["meganeura-import", "meganeura-serve", "fuzz"]),
    ("egg", &["meganeura-codegen"]),
    ("naga", &["meganeura-codegen", "meganeura-runtime"]),
    ("blade-graphics", &["meganeura-runtime"]),
    ("ash", &["meganeura-runtime", "xtask"]),
    ("clap", &["meganeura", "conformance"]),
    ("tokio", &["meganeura-serve"]),
    ("hyper", &["meganeura-serve"]),
    ("axum", &["meganeura-serve"]),
    ("tonic", &["meganeura-serve"]),
];

type TestResult<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// What only the command line may use of the crates of the workspace: the library stays without it.
const COMMAND_LINE: &str = "meganeura_serve";

/// `(crate, the names of what its code depends on)` for every crate of the workspace, development dependencies left out.
fn dependencies() -> TestResult<Vec<(String, Vec<String>)>> {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: Value = serde_json::from_slice(&metadata.stdout)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let name = |value: &Value| value["name"].as_str().unwrap_or_default().to_string();
    let used = |package: &Value| {
        let all = package["dependencies"].as_array().into_iter().flatten();
        all.filter(|dependency| dependency["kind"] != "dev").map(name).collect()
    };
    Ok(packages.iter().map(|package| (name(package), used(package))).collect())
}

#[test]
fn crates_depend_in_one_direction_only() -> TestResult {
    let dependencies = dependencies()?;
    let is_ours = |name: &String| LAYERS.iter().any(|(layer, _)| layer == name);
    assert_eq!(dependencies.len(), LAYERS.len(), "a crate is missing from LAYERS");
    for (name, used) in dependencies {
        let (_, allowed) = LAYERS.iter().find(|(layer, _)| *layer == name).ok_or(format!("{name} is not in LAYERS"))?;
        for dependency in used.iter().filter(|dependency| is_ours(dependency)) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not depend on {dependency}");
        }
    }
    Ok(())
}

#[test]
fn each_heavyweight_dependency_is_known_to_its_crates_only() -> TestResult {
    for (name, used) in dependencies()? {
        for (dependency, allowed) in CONFINED {
            let found = used.iter().any(|used| used == dependency);
            assert!(!found || allowed.contains(&name.as_str()), "{name} must not depend on {dependency}");
        }
    }
    Ok(())
}

#[test]
fn only_the_command_line_knows_the_server() -> TestResult {
    fn sources(folder: &std::path::Path) -> TestResult<Vec<std::path::PathBuf>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() { found.extend(sources(&path)?) } else { found.push(path) }
        }
        Ok(found)
    }
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in sources(&root)? {
        let allowed = path.starts_with(root.join("cli"));
        let uses = std::fs::read_to_string(&path)?.contains(COMMAND_LINE);
        assert!(allowed || !uses, "{} must not use {COMMAND_LINE}", path.display());
    }
    Ok(())
}
