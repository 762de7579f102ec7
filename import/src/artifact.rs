//! The imported artifact: a safetensors file that holds the weights under their names in the model, in their dtypes, and the
//! model itself, without weights, in the file's metadata. Every reader of safetensors finds the weights; [`Model::open`] finds
//! the model.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use meganeura_ir::{DType, Tensor, TensorType};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

use crate::error::{ArtifactError, ImportError};
use crate::limits::{Limit, Limits};
use crate::model::{Model, ModelParameter};
use crate::specialize::Bindings;
use crate::tensor::{TensorError, from_raw, release};
use crate::write::{ParameterData, WeightSource, rewritten, stored_type, write_weight};

/// Version of the metadata below.
const FORMAT: &str = "1";
/// What the safetensors library accepts as a header.
const MAX_HEADER: usize = 100_000_000;
/// The header's entry that is no tensor.
const METADATA: &str = "__metadata__";

mod key {
    pub const FORMAT: &str = "meganeura.format";
    /// The serialised `ModelProto` without the data of parameters: zlib, then base64.
    pub const STRUCTURE: &str = "meganeura.structure";
    /// The outputs that the import kept, as a JSON list; absent if all.
    pub const OUTPUTS: &str = "meganeura.outputs";
    /// Present if quantisation was undone: the file holds quantised weights as floats.
    pub const DEQUANTIZED: &str = "meganeura.dequantized";
    /// Default sizes, as JSON.
    pub const BINDINGS: &str = "meganeura.bindings";
    /// The file that was imported.
    pub const SOURCE: &str = "meganeura.source";
    /// The program that exported it.
    pub const PRODUCER: &str = "meganeura.producer";
    /// What the tensors are that are no parameters; see [`Attachments`](super::Attachments).
    pub const ATTACHMENTS: &str = "meganeura.attachments";
}

/// Float dtypes, which alone can be parameters, and their names in safetensors.
const DTYPES: [(DType, Dtype, &str); 4] = [
    (DType::F32, Dtype::F32, "F32"),
    (DType::F16, Dtype::F16, "F16"),
    (DType::BF16, Dtype::BF16, "BF16"),
    (DType::F64, Dtype::F64, "F64"),
];

/// An opened artifact: the mapped file, and where each weight lies.
#[derive(Debug)]
pub(crate) struct Artifact {
    map: Mmap,
    weights: HashMap<String, (TensorType, Range<usize>)>,
    pub outputs: Option<Vec<String>>,
    /// The import undid quantisation: quantised weights of the ONNX file are floats here.
    pub dequantized: bool,
    pub bindings: Bindings,
    pub source: Option<String>,
    /// The description of what is attached.
    pub attachments: Option<String>,
}

/// What an artifact holds beside the model and its parameters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attachments {
    /// What the tensors are; an artifact without it holds none.
    pub description: Option<String>,
    /// Floats, by names that no parameter has.
    pub tensors: BTreeMap<String, Tensor>,
}

/// Whether the bytes begin as a safetensors file does: the length of a JSON object, then the object. No `ModelProto` begins so.
pub(crate) fn is_safetensors(bytes: &[u8]) -> bool {
    let Some((length, header)) = bytes.split_first_chunk::<8>() else { return false };
    header.first() == Some(&b'{') && u64::from_le_bytes(*length) <= header.len() as u64
}

impl Artifact {
    /// Opens a mapped artifact. Also returns the structure: a serialised `ModelProto`.
    pub fn open(map: Mmap, limits: &Limits) -> Result<(Artifact, Vec<u8>), ArtifactError> {
        let (header, metadata) = SafeTensors::read_metadata(&map)?;
        let empty = HashMap::new();
        let entries = metadata.metadata().as_ref().unwrap_or(&empty);
        let encoded = entries.get(key::STRUCTURE).ok_or(ArtifactError::NoStructure)?;
        match entries.get(key::FORMAT).map(String::as_str) {
            Some(FORMAT) => {}
            found => return Err(ArtifactError::Format { found: found.unwrap_or("unknown").to_owned(), expected: FORMAT }),
        }
        let structure = decompress(encoded, limits)?;
        let parse = |key: &str| entries.get(key).map(String::as_str);
        let json = |e: serde_json::Error| ArtifactError::Structure(e.to_string());
        let outputs = parse(key::OUTPUTS).map(serde_json::from_str).transpose().map_err(json)?;
        let bindings = parse(key::BINDINGS).map(serde_json::from_str).transpose().map_err(json)?.unwrap_or_default();
        let source = parse(key::SOURCE).map(str::to_owned);
        let dequantized = parse(key::DEQUANTIZED).is_some();
        let attachments = parse(key::ATTACHMENTS).map(str::to_owned);

        // `read_metadata` has checked that the tensors fill the file without gaps.
        let data = 8 + header;
        let mut weights = HashMap::new();
        for (name, info) in metadata.tensors() {
            let Some((dtype, ..)) = DTYPES.iter().find(|(_, d, _)| *d == info.dtype) else { continue };
            let range = data + info.data_offsets.0..data + info.data_offsets.1;
            weights.insert(name, (TensorType::new(*dtype, info.shape.as_slice()), range));
        }
        Ok((Artifact { map, weights, outputs, dequantized, bindings, source, attachments }, structure))
    }

    pub fn holds(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }

    /// A tensor by its name.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        let (ty, range) = self.weights.get(name)?;
        from_raw(ty.clone(), self.map.get(range.clone())?).ok()
    }

    /// The stored value of a parameter.
    pub fn read(&self, parameter: &ModelParameter) -> Result<Tensor, TensorError> {
        let bytes = self.bytes(parameter)?;
        let tensor = from_raw(stored_type(parameter), bytes);
        release(&self.map, bytes);
        tensor
    }

    /// The elements of a parameter as they lie in the file.
    pub fn bytes(&self, parameter: &ModelParameter) -> Result<&[u8], TensorError> {
        let (ty, range) = self.weights.get(&parameter.name).ok_or(TensorError::NotInArtifact)?;
        let expected = stored_type(parameter);
        if *ty != expected {
            return Err(TensorError::Type { found: ty.clone(), expected });
        }
        self.map.get(range.clone()).ok_or(TensorError::OutOfFile)
    }
}

fn decompress(encoded: &str, limits: &Limits) -> Result<Vec<u8>, ArtifactError> {
    let most = limits.get(Limit::StructureBytes);
    let damaged = |e: &dyn std::fmt::Display| ArtifactError::Structure(e.to_string());
    let compressed = BASE64.decode(encoded).map_err(|e| damaged(&e))?;
    let mut structure = Vec::new();
    let mut decoder = ZlibDecoder::new(compressed.as_slice()).take(most.saturating_add(1));
    decoder.read_to_end(&mut structure).map_err(|e| damaged(&e))?;
    limits.check(Limit::StructureBytes, structure.len() as u64).map_err(|e| damaged(&e))?;
    Ok(structure)
}

/// Base64 of the zlib stream of the model without weights.
fn compressed_structure(model: &Model) -> Result<String, ImportError> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    let absent = |name: &str, _: u64, _: &mut ZlibEncoder<Vec<u8>>| Err(ImportError::UnknownParameter(name.to_owned()));
    rewritten(model, ParameterData::Absent)?.write(&mut encoder, &model.skeleton, absent)?;
    Ok(BASE64.encode(encoder.finish().map_err(ArtifactError::Write)?))
}

impl From<io::Error> for ImportError {
    fn from(source: io::Error) -> Self {
        ArtifactError::Write(source).into()
    }
}

/// Writes the artifact of `model` with the weights that `weights` supplies, one at a time, as they are written.
///
/// Tensors are aligned to their elements; the same model and weights give the same bytes.
///
/// # Errors
/// [`ArtifactError::HeaderTooLarge`] or [`ArtifactError::ReservedName`] before anything is written;
/// [`ArtifactError::WeightType`] if a supplied weight does not have the type of the parameter; errors of `weights` and of `out`.
pub fn write_artifact(out: &mut dyn Write, model: &Model, weights: &WeightSource) -> Result<(), ImportError> {
    write_artifact_with(out, model, weights, &Attachments::default())
}

/// As [`write_artifact`], with tensors of the caller's, which [`Model::attached`] reads.
///
/// # Errors
/// As [`write_artifact`]; [`ArtifactError::Attachment`] where a parameter has the name of such a tensor, or it is not of floats.
pub fn write_artifact_with(
    out: &mut dyn Write,
    model: &Model,
    weights: &WeightSource,
    attachments: &Attachments,
) -> Result<(), ImportError> {
    let entries = entries(model, attachments)?;
    let header = header(model, &entries, attachments)?;
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(ArtifactError::Write)?;
    out.write_all(&header).map_err(ArtifactError::Write)?;
    for entry in entries {
        match entry {
            Entry::Parameter(parameter) => write_weight(parameter, weights, out)?,
            Entry::Attached(_, tensor) => out.write_all(tensor.bytes()).map_err(ArtifactError::Write)?,
        }
    }
    Ok(())
}

/// A tensor of the file.
#[derive(Clone, Copy, Debug)]
enum Entry<'a> {
    Parameter(&'a ModelParameter),
    Attached(&'a str, &'a Tensor),
}

impl Entry<'_> {
    fn name(&self) -> &str {
        match self {
            Entry::Parameter(parameter) => &parameter.name,
            Entry::Attached(name, _) => name,
        }
    }

    fn ty(&self) -> TensorType {
        match self {
            Entry::Parameter(parameter) => stored_type(parameter),
            Entry::Attached(_, tensor) => tensor.ty().clone(),
        }
    }
}

/// What the file holds: wide elements first, so that every tensor is aligned to its element.
fn entries<'a>(model: &'a Model, attachments: &'a Attachments) -> Result<Vec<Entry<'a>>, ArtifactError> {
    let attached = attachments.tensors.iter().map(|(name, tensor)| Entry::Attached(name, tensor));
    let mut entries: Vec<Entry> = model.parameters().iter().map(Entry::Parameter).chain(attached).collect();
    for entry in &entries {
        let name = entry.name().to_owned();
        match entry {
            _ if name == METADATA => return Err(ArtifactError::ReservedName(name)),
            Entry::Attached(_, tensor) if !tensor.dtype().is_float() || model.parameter(&name).is_some() => {
                return Err(ArtifactError::Attachment(name));
            }
            _ => {}
        }
    }
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.ty().dtype.size()));
    Ok(entries)
}

fn header(model: &Model, tensors: &[Entry], attachments: &Attachments) -> Result<Vec<u8>, ImportError> {
    let mut metadata = Map::new();
    let mut set = |key: &str, value: String| metadata.insert(key.to_owned(), Value::String(value));
    set("format", "pt".to_owned());
    set(key::FORMAT, FORMAT.to_owned());
    set(key::STRUCTURE, compressed_structure(model)?);
    set(key::PRODUCER, model.producer().to_owned());
    if let Some(source) = model.source() {
        set(key::SOURCE, source.to_owned());
    }
    if let Some(outputs) = model.kept_outputs() {
        set(key::OUTPUTS, json!(outputs).to_string());
    }
    if model.is_dequantized() {
        set(key::DEQUANTIZED, "true".to_owned());
    }
    if *model.bindings() != Bindings::default() {
        set(key::BINDINGS, json!(model.bindings()).to_string());
    }
    if let Some(description) = &attachments.description {
        set(key::ATTACHMENTS, description.clone());
    }

    let mut entries = Map::new();
    entries.insert(METADATA.to_owned(), Value::Object(metadata));
    let mut offset = 0;
    for tensor in tensors {
        let ty = tensor.ty();
        let dtype = DTYPES.iter().find(|(d, ..)| *d == ty.dtype).map_or("F32", |(.., name)| name);
        let end = offset + ty.bytes();
        let entry = json!({ "dtype": dtype, "shape": ty.shape.to_vec(), "data_offsets": [offset, end] });
        entries.insert(tensor.name().to_owned(), entry);
        offset = end;
    }
    let mut header = serde_json::to_vec(&entries).map_err(|e| ArtifactError::Structure(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > MAX_HEADER {
        return Err(ArtifactError::HeaderTooLarge { found: header.len(), limit: MAX_HEADER }.into());
    }
    Ok(header)
}
