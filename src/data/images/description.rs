//! What a model's own files say about its images: the metadata of an ONNX file as the exporter of ultralytics writes it, and the
//! `preprocessor_config.json` of Hugging Face beside the file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::preprocessing::{Fit, ImageOptions, PreprocessingError};
use super::resample::Filter;

/// The entry of a model's metadata with the names of its classes: `{0: 'cat', 1: 'dog'}`.
pub(crate) const NAMES_KEY: &str = "names";
const SIZE_KEY: &str = "imgsz";
const TASK_KEY: &str = "task";
const CONFIG: &str = "preprocessor_config.json";
/// A larger file is none of Hugging Face's.
const MAX_CONFIG: u64 = 1 << 20;

/// What is said about the images of a model with this metadata in a file at `path`.
///
/// # Errors
/// There is a description that is damaged, or asks for something that cannot be done here.
pub(crate) fn described(metadata: &BTreeMap<String, String>, path: &Path) -> Result<ImageOptions, PreprocessingError> {
    let config = path.with_file_name(CONFIG);
    let beside = match fs::metadata(&config) {
        Ok(found) if found.is_file() && found.len() <= MAX_CONFIG => {
            let refused = |reason: String| PreprocessingError::Description { file: config.display().to_string(), reason };
            let text = fs::read_to_string(&config).map_err(|e| refused(e.to_string()))?;
            let config: Value = serde_json::from_str(&text).map_err(|e| refused(e.to_string()))?;
            hugging_face(&config).map_err(refused)?
        }
        _ => ImageOptions::default(),
    };
    Ok(ultralytics(metadata).or(beside))
}

/// `imgsz` is `[height, width]`; classifiers see the middle of an image, detectors all of it.
fn ultralytics(metadata: &BTreeMap<String, String>) -> ImageOptions {
    let size = metadata.get(SIZE_KEY).and_then(|text| serde_json::from_str::<Vec<usize>>(text).ok());
    let size = size.and_then(|size| if let [height, width] = size[..] { Some((width, height)) } else { None });
    let fit = size.map(|_| match metadata.get(TASK_KEY).map(String::as_str) {
        Some("classify") => Fit::Crop { shortest: None },
        _ => Fit::Letterbox,
    });
    ImageOptions { size, fit, ..ImageOptions::default() }
}

fn hugging_face(config: &Value) -> Result<ImageOptions, String> {
    let enabled = |key: &str| config.get(key).and_then(Value::as_bool).unwrap_or(true);
    let whole = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    // A square is one number, or both sides have names.
    let sides = |key: &str| -> Option<(usize, usize)> {
        let value = config.get(key)?;
        whole(value).map(|side| (side, side)).or_else(|| Some((whole(value.get("width")?)?, whole(value.get("height")?)?)))
    };
    let numbers = |key: &str| -> Option<Vec<f64>> { config.get(key)?.as_array()?.iter().map(Value::as_f64).collect() };
    let shortest = config.get("size").and_then(|size| whole(size.get("shortest_edge")?));
    let crops = config.get("do_center_crop").and_then(Value::as_bool).unwrap_or(config.get("crop_size").is_some());
    let (size, fit) = match (shortest, crops) {
        (Some(shortest), true) => (sides("crop_size"), Fit::Crop { shortest: Some(shortest) }),
        // Below 384 pixels this image processor cuts the middle out of a somewhat larger image.
        (Some(side), false) => match config.get("crop_pct").and_then(Value::as_f64).filter(|share| *share > 0.0 && side < 384) {
            Some(share) => (Some((side, side)), Fit::Crop { shortest: Some((side as f64 / share) as usize) }),
            None if config.get("crop_pct").is_some() => (Some((side, side)), Fit::Stretch),
            None => return Err(
                "\"shortest_edge\" without \"do_center_crop\" gives images of many sizes: say --image-size and --image-resize"
                    .into(),
            ),
        },
        (None, true) if sides("size").is_some() && sides("size") != sides("crop_size") => {
            return Err("\"size\" and another \"crop_size\" are not supported: say --image-size and --image-resize".to_owned());
        }
        (None, _) => (sides("size"), Fit::Stretch),
    };
    let filter = match config.get("resample").map(Value::as_u64) {
        None => None,
        Some(Some(2)) => Some(Filter::Bilinear),
        Some(Some(3)) => Some(Filter::Bicubic),
        Some(_) => return Err("\"resample\" is neither 2 (bilinear) nor 3 (bicubic): say --image-filter".to_owned()),
    };
    let scale = if enabled("do_rescale") { config.get("rescale_factor").and_then(Value::as_f64) } else { Some(1.0) };
    let normalises = enabled("do_normalize");
    Ok(ImageOptions {
        size,
        fit: size.map(|_| fit),
        filter,
        scale,
        mean: numbers("image_mean").filter(|_| normalises),
        std: numbers("image_std").filter(|_| normalises),
        ..ImageOptions::default()
    })
}

/// The names of the classes that a model's metadata holds, if it holds one for each index from 0.
pub(crate) fn class_names(metadata: &BTreeMap<String, String>) -> Option<Vec<String>> {
    let by_index = parse_names(metadata.get(NAMES_KEY)?)?;
    let in_order = by_index.keys().copied().eq(0..by_index.len());
    (in_order && !by_index.is_empty()).then(|| by_index.into_values().collect())
}

/// Names in the form in which [`class_names`] finds them.
pub(crate) fn written_names(names: &[String]) -> String {
    let quoted = |name: &String| format!("'{}'", name.replace('\\', "\\\\").replace('\'', "\\'"));
    let pairs: Vec<String> = names.iter().enumerate().map(|(index, name)| format!("{index}: {}", quoted(name))).collect();
    format!("{{{}}}", pairs.join(", "))
}

/// A Python dictionary from whole numbers to strings, or JSON of the same.
fn parse_names(text: &str) -> Option<BTreeMap<usize, String>> {
    let mut rest = text.trim().strip_prefix('{')?.trim_start();
    let mut names = BTreeMap::new();
    while !rest.starts_with('}') {
        let (index, after) = rest.split_once(':')?;
        let (name, after) = parse_string(after.trim_start())?;
        names.insert(index.trim().trim_matches('"').parse().ok()?, name);
        rest = after.trim_start();
        rest = rest.strip_prefix(',').map_or(rest, str::trim_start);
        if rest.is_empty() {
            return None;
        }
    }
    Some(names)
}

/// A string in quotes of either kind, and what follows it.
fn parse_string(text: &str) -> Option<(String, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let (mut out, mut escaped) = (String::new(), false);
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => {
                out.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            c if c == quote => return Some((out, &text[at + c.len_utf8()..])),
            c => out.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_survive_the_way_through_metadata() {
        let names: Vec<String> = ["it's", "a \"b\"", "c\\", "", "d, e: {f}"].map(String::from).into();
        let metadata = BTreeMap::from([(NAMES_KEY.to_owned(), written_names(&names))]);
        assert_eq!(class_names(&metadata), Some(names));
    }

    #[test]
    fn names_of_ultralytics_are_read_and_nonsense_is_not() {
        let found = |text: &str| class_names(&BTreeMap::from([(NAMES_KEY.to_owned(), text.to_owned())]));
        assert_eq!(found("{0: 'person', 1: \"driver's cab\"}"), Some(vec!["person".to_owned(), "driver's cab".to_owned()]));
        assert_eq!(found("{\"0\": \"a\"}"), Some(vec!["a".to_owned()]));
        for text in ["", "{", "{}", "[1]", "{0: 'a'", "{1: 'a'}", "{0: a}", "{0: 'a}", "{0 'a'}", "{0: 'a' 1"] {
            assert_eq!(found(text), None, "{text}");
        }
    }

    #[test]
    fn the_size_of_ultralytics_has_the_height_first() {
        let metadata =
            |task: &str| BTreeMap::from([(SIZE_KEY, "[320, 640]"), (TASK_KEY, task)].map(|(k, v)| (k.to_owned(), v.to_owned())));
        let found = ultralytics(&metadata("detect"));
        assert_eq!((found.size, found.fit), (Some((640, 320)), Some(Fit::Letterbox)));
        assert_eq!(ultralytics(&metadata("classify")).fit, Some(Fit::Crop { shortest: None }));
        assert_eq!(ultralytics(&BTreeMap::new()), ImageOptions::default());
    }

    #[test]
    fn the_metadata_counts_before_the_file_beside_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.onnx");
        let size = |metadata| described(&metadata, &model).map(|found| found.size);
        assert_eq!(size(BTreeMap::new()), Ok(None));
        fs::write(folder.path().join(CONFIG), r#"{"size": 96}"#).unwrap();
        assert_eq!(size(BTreeMap::new()), Ok(Some((96, 96))));
        assert_eq!(size(BTreeMap::from([(SIZE_KEY.to_owned(), "[32, 64]".to_owned())])), Ok(Some((64, 32))));
        fs::write(folder.path().join(CONFIG), "{").unwrap();
        let message = size(BTreeMap::new()).unwrap_err().to_string();
        assert!(message.contains(CONFIG), "{message}");
    }

    #[test]
    fn image_processors_of_hugging_face_are_understood() {
        let vit = json!({"do_normalize": true, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
            "rescale_factor": 0.00392156862745098, "size": {"height": 224, "width": 192}});
        let found = hugging_face(&vit).unwrap();
        assert_eq!((found.size, found.fit, found.filter), (Some((192, 224)), Some(Fit::Stretch), Some(Filter::Bilinear)));
        assert_eq!((found.mean, found.scale), (Some(vec![0.5; 3]), Some(0.00392156862745098)));

        let cropping = json!({"crop_size": {"height": 224, "width": 224}, "do_center_crop": true, "do_normalize": false, "image_mean": [1],
            "resample": 3, "size": {"shortest_edge": 256}, "do_rescale": false});
        let found = hugging_face(&cropping).unwrap();
        assert_eq!(
            (found.size, found.fit, found.filter),
            (Some((224, 224)), Some(Fit::Crop { shortest: Some(256) }), Some(Filter::Bicubic))
        );
        assert_eq!((found.mean, found.scale), (None, Some(1.0)));

        let convnext = json!({"crop_pct": 0.875, "size": {"shortest_edge": 224}});
        assert_eq!(hugging_face(&convnext).unwrap().fit, Some(Fit::Crop { shortest: Some(256) }));
        for unsupported in
            [json!({"size": {"shortest_edge": 800}}), json!({"size": 256, "crop_size": 224}), json!({"resample": 0})]
        {
            hugging_face(&unsupported).unwrap_err();
        }
    }
}
