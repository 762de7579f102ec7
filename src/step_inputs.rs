//! The inputs of a training step, in tensors that every step overwrites.

use meganeura_codegen::Program;
use meganeura_import::RANDOM_KEY;
use meganeura_ir::{Tensor, random_key_words};

/// One tensor per input of a program, in its order.
pub(crate) struct StepInputs {
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

impl StepInputs {
    /// Zeros.
    pub fn new(program: &Program) -> Self {
        let inputs = program.inputs.iter();
        let (names, tensors) = inputs.map(|input| (input.name.clone(), Tensor::zeros(input.ty.clone()))).unzip();
        StepInputs { names, tensors }
    }

    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Copies, with names.
    pub fn named(&self) -> Vec<(String, Tensor)> {
        self.names.iter().cloned().zip(self.tensors.iter().cloned()).collect()
    }

    pub fn position(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|n| n == name)
    }

    pub fn get_mut(&mut self, name: &str) -> Option<&mut Tensor> {
        self.position(name).and_then(|position| self.tensors.get_mut(position))
    }

    /// Sets an f32 scalar.
    pub fn set_scalar(&mut self, position: usize, value: f32) {
        if let Some(tensor) = self.tensors.get_mut(position) {
            tensor.bytes_mut().copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Sets the key of a step's random numbers, where the program draws any.
    pub fn set_random_key(&mut self, seed: u64, step: u64) {
        if let Some(tensor) = self.get_mut(RANDOM_KEY) {
            let places = tensor.bytes_mut().chunks_exact_mut(4);
            places.zip(random_key_words(seed, step)).for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
        }
    }
}
