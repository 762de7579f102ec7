//! What a model says about the images that it takes, and about its classes.

use meganeura_import::Bindings;

use crate::data::{ImageOptions, ImagePreprocessing, NAMES_KEY, class_names, described, written_names};
use crate::error::Error;
use crate::model::Model;

impl Model {
    /// What happens to images before this model sees them: what `options` say, else the model's metadata (as the exporter of ultralytics writes
    /// it) or a `preprocessor_config.json` of Hugging Face beside its file, else what follows from the shape of the input.
    ///
    /// # Errors
    /// The model has not one input of images, or something about it stays unknown or is contradictory.
    pub fn image_preprocessing(&self, bindings: &Bindings, options: ImageOptions) -> Result<ImagePreprocessing, Error> {
        let options = options.or(described(self.imported().metadata(), self.path())?);
        Ok(ImagePreprocessing::new(&self.bound_inputs(bindings), &options)?)
    }

    /// Names of the classes, by index, where the model's metadata holds them.
    pub fn class_names(&self) -> Option<Vec<String>> {
        class_names(self.imported().metadata())
    }

    /// Notes the names of the classes in the metadata of the files that the model is written to.
    ///
    /// # Errors
    /// None that is known.
    pub fn set_class_names(&mut self, names: &[String]) -> Result<(), Error> {
        self.set_metadata(NAMES_KEY, &written_names(names))
    }
}
