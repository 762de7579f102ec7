//! Frames with guests: one encoder and one submission per frame hold the passes of the host and the dispatches of its guests.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blade_graphics::{CommandEncoder, CommandEncoderDesc, Context};
use meganeura::{Error, Tensor};

use crate::renderer::{PASSES, Renderer};
use crate::tenants::Tenants;

/// A program that renders, and lets a model infer and train between its passes.
pub struct Host {
    context: Arc<Context>,
    encoder: CommandEncoder,
    renderer: Renderer,
    frame: u32,
}

/// What came of a frame.
pub struct Frame {
    pub number: u32,
    pub pixels: Vec<[u8; 4]>,
    /// Outputs of the inference, and of the training step.
    pub inferred: Vec<Tensor>,
    pub trained: Vec<Tensor>,
    /// From the start of its recording until the device was done.
    pub time: Duration,
    /// Which pass of the frame belongs to whom, in order.
    pub passes: Vec<Pass>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Host,
    Inference,
    Training,
}

impl Host {
    pub fn new(context: &Arc<Context>) -> Self {
        let desc = CommandEncoderDesc { name: "host", buffer_count: 1, manual_barriers: true };
        let (encoder, renderer) = (context.create_command_encoder(desc), Renderer::new(context));
        Host { context: context.clone(), encoder, renderer, frame: 0 }
    }

    /// Renders the next frame. An inference and then a training step run between its passes, each in `chunks` pieces.
    ///
    /// The training step begins after the inference has ended: it changes the weights that the inference reads.
    pub fn render(&mut self, tenants: &mut Tenants, chunks: usize) -> Result<Frame, Error> {
        let Tenants { inference, training } = tenants;
        inference.prepare()?;
        training.prepare()?;
        let of = |pass: Pass, runs: Vec<Range<usize>>| runs.into_iter().map(move |run| (pass, run));
        let inferring = of(Pass::Inference, inference.session.chunks(chunks));
        let work: Vec<_> = inferring.chain(of(Pass::Training, training.session.chunks(chunks))).collect();

        let started = Instant::now();
        self.encoder.start();
        if self.frame == 0 {
            self.renderer.prepare(&mut self.encoder);
        }
        let mut passes = Vec::new();
        let mut waiting = work.iter();
        for pass in 0..PASSES {
            self.renderer.draw(&mut self.encoder, self.frame, pass);
            passes.push(Pass::Host);
            // Pass `i` of `n` is followed by all work that is due at `(i + 1) / n` of the frame.
            let due = work.len() * (pass as usize + 1) / PASSES as usize - (work.len() - waiting.len());
            for (guest, run) in waiting.by_ref().take(due) {
                let session = if *guest == Pass::Inference { &mut inference.session } else { &mut training.session };
                session.record(&mut self.encoder, run.clone())?;
                passes.push(*guest);
            }
        }
        self.renderer.keep(&mut self.encoder);
        passes.push(Pass::Host);
        let done = self.context.submit(&mut self.encoder);
        self.context.wait_for(&done, u32::MAX).expect("the device works");
        let time = started.elapsed();

        let (number, pixels) = (self.frame, self.renderer.pixels());
        self.frame += 1;
        let (inferred, trained) = (inference.session.read_outputs()?, training.session.read_outputs()?);
        Ok(Frame { number, pixels, inferred, trained, time, passes })
    }

    /// What each pass of the last frame took on the device. Empty where it has no timer.
    pub fn timings(&mut self) -> Vec<Duration> {
        self.encoder.start();
        let timings = self.encoder.timings().iter().map(|(_, time)| *time).collect();
        let done = self.context.submit(&mut self.encoder);
        self.context.wait_for(&done, u32::MAX).expect("the device works");
        timings
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.context.destroy_command_encoder(&mut self.encoder);
    }
}
