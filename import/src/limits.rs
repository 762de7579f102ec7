//! What a file may ask of the machine that imports it. Every limit is checked before the memory or the time is spent.

use std::fmt;

use meganeura_ir::{MAX_ELEMENTS, MAX_RANK};

use Limit as L;

/// A quantity that [`Limits`] bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    FileBytes,
    StructureBytes,
    Nodes,
    ExpandedNodes,
    SubgraphDepth,
    FunctionDepth,
    Attributes,
    NameBytes,
    Rank,
    Elements,
    WeightBytes,
    DenseBytes,
    ExternalFiles,
    ExternalBytes,
}

struct Row {
    limit: Limit,
    /// The name on the command line.
    name: &'static str,
    default: u64,
    /// Above this nothing works: the limit cannot be raised further.
    ceiling: u64,
    what: &'static str,
}

const fn row(limit: Limit, name: &'static str, default: u64, ceiling: u64, what: &'static str) -> Row {
    Row { limit, name, default, ceiling, what }
}

/// Protobuf messages end here.
const PROTOBUF_BYTES: u64 = i32::MAX as u64;
/// No offset in a file is larger.
const OFFSETS: u64 = i64::MAX as u64;
const GIB: u64 = 1 << 30;

/// Indices of nodes end here.
const COUNTS: u64 = u32::MAX as u64;
const RANK: u64 = MAX_RANK as u64;
const ELEMENTS: u64 = MAX_ELEMENTS as u64 - 1;

/// In the order of [`Limit`].
#[rustfmt::skip]
static TABLE: [Row; 14] = [
    row(L::FileBytes,      "file-bytes",      PROTOBUF_BYTES, PROTOBUF_BYTES, "bytes of the .onnx file"),
    row(L::StructureBytes, "structure-bytes", GIB,            PROTOBUF_BYTES, "bytes of memory for all but the weights"),
    row(L::Nodes,          "nodes",           1_000_000,      COUNTS,         "nodes, with those of subgraphs and functions"),
    row(L::ExpandedNodes,  "expanded-nodes",  1_000_000,      COUNTS,         "nodes once model-local functions are inlined"),
    row(L::SubgraphDepth,  "subgraph-depth",  16,             18,             "levels of subgraphs in subgraphs"),
    row(L::FunctionDepth,  "function-depth",  64,             256,            "levels of functions that call functions"),
    row(L::Attributes,     "attributes",      1_000,          COUNTS,         "attributes of one node"),
    row(L::NameBytes,      "name-bytes",      16_384,         PROTOBUF_BYTES, "bytes of one name"),
    row(L::Rank,           "rank",            RANK,           RANK,           "axes of a tensor"),
    row(L::Elements,       "elements",        ELEMENTS,       ELEMENTS,       "elements of one tensor"),
    row(L::WeightBytes,    "weight-bytes",    256 * GIB,      OFFSETS,        "bytes of all stored tensors"),
    row(L::DenseBytes,     "dense-bytes",     GIB / 4,        OFFSETS,        "bytes of all sparse initializers once dense"),
    row(L::ExternalFiles,  "external-files",  10_000,         60_000,         "files with external data"),
    row(L::ExternalBytes,  "external-bytes",  256 * GIB,      OFFSETS,        "bytes of one file with external data"),
];

impl Limit {
    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Every limit.
    pub fn all() -> impl Iterator<Item = Limit> {
        TABLE.iter().map(|row| row.limit)
    }
}

impl fmt::Display for Limit {
    /// What is counted.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().what)
    }
}

/// Bounds of what an import takes in. The defaults admit every model that a GPU of today can hold; `docs/LIMITS.md` lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits([u64; TABLE.len()]);

impl Default for Limits {
    fn default() -> Self {
        Limits(TABLE.each_ref().map(|row| row.default))
    }
}

impl Limits {
    pub fn get(&self, limit: Limit) -> u64 {
        self.0[limit as usize]
    }

    /// Sets a limit by its name.
    ///
    /// # Errors
    /// No limit has this name, or the value is above what the limit can be raised to.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), LimitSettingError> {
        let row =
            TABLE.iter().find(|row| row.name == name).ok_or_else(|| LimitSettingError::Unknown { name: name.to_owned() })?;
        if value > row.ceiling {
            return Err(LimitSettingError::Ceiling { name: row.name, value, ceiling: row.ceiling });
        }
        self.0[row.limit as usize] = value;
        Ok(())
    }

    /// Checks a quantity.
    ///
    /// # Errors
    /// `found` is above the limit.
    pub fn check(&self, limit: Limit, found: u64) -> Result<(), LimitError> {
        let allowed = self.get(limit);
        if found <= allowed { Ok(()) } else { Err(LimitError { limit, found, allowed }) }
    }
}

/// A file asks for more than [`Limits`] allow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitError {
    pub limit: Limit,
    /// What the file asks for, or what had been counted when the import stopped.
    pub found: u64,
    pub allowed: u64,
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LimitError { limit, found, allowed } = self;
        write!(f, "{limit}: {found} where {allowed} are allowed")?;
        match limit.row().ceiling > *allowed {
            true => write!(f, "; for a file that you trust raise it with --limit {}=N", limit.name()),
            false => Ok(()),
        }
    }
}

impl std::error::Error for LimitError {}

/// A limit that cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitSettingError {
    #[error("there is no limit {name:?}; there are {}", names())]
    Unknown { name: String },
    #[error("the limit {name} can be at most {ceiling}, not {value}")]
    Ceiling { name: &'static str, value: u64, ceiling: u64 },
}

fn names() -> String {
    TABLE.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.limit as usize, index, "{}", row.name);
            assert!(row.default <= row.ceiling);
        }
    }

    #[test]
    fn limits_are_set_by_name() {
        let mut limits = Limits::default();
        limits.set("nodes", 3).unwrap();
        assert_eq!(limits.check(Limit::Nodes, 3), Ok(()));
        let error = limits.check(Limit::Nodes, 4).unwrap_err();
        assert_eq!((error.found, error.allowed), (4, 3));
        assert!(error.to_string().contains("--limit nodes=N"), "{error}");
        assert!(limits.set("nodas", 3).unwrap_err().to_string().contains("nodes"));
        assert!(matches!(limits.set("rank", 9), Err(LimitSettingError::Ceiling { .. })));
    }

    /// docs/LIMITS.md shows the table as it is.
    #[test]
    fn the_document_lists_every_limit() {
        let document = include_str!("../../docs/LIMITS.md");
        for row in &TABLE {
            let line = format!("| `{}` | {} | {} | {} |", row.name, row.what, row.default, row.ceiling);
            assert!(document.contains(&line), "docs/LIMITS.md lacks the line\n{line}");
        }
    }
}
