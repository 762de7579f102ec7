//! Tells the crate which code it is built from, so that plans made by other code are not taken for its own.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// What decides the program of a graph. In a published crate only the first is there; versions of the others are exact enough then.
const SOURCES: &[&str] = &["src", "../shaders/src", "../ir/src"];
const LOCK: &str = "../Cargo.lock";
/// Dependencies that take part.
const DEPENDENCIES: &[&str] = &["egg", "naga", "postcard"];

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let mut files = BTreeMap::new();
    for source in SOURCES.iter().map(|folder| root.join(folder)).filter(|folder| folder.exists()) {
        println!("cargo:rerun-if-changed={}", source.display());
        collect(&root, &source, &mut files)?;
    }
    let lock = root.join(LOCK);
    if lock.exists() {
        println!("cargo:rerun-if-changed={}", lock.display());
        files.insert(LOCK.into(), locked(&fs::read_to_string(lock)?).into_bytes());
    }
    println!("cargo:rerun-if-changed=build.rs");
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    println!("cargo:rustc-env=MEGANEURA_CODEGEN_SOURCES={:016x}", hasher.finish());
    Ok(())
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, files)?;
        } else {
            files.insert(path.strip_prefix(root).unwrap_or(&path).into(), fs::read(&path)?);
        }
    }
    Ok(())
}

/// The versions of [`DEPENDENCIES`].
fn locked(lock: &str) -> String {
    let is_ours = |package: &&str| DEPENDENCIES.iter().any(|name| package.contains(&format!("name = \"{name}\"\n")));
    lock.split("[[package]]").filter(is_ours).collect()
}
