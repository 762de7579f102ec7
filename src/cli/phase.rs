//! The flags for layers that act differently in training.

use clap::{Args, ValueEnum};
use meganeura::{Mode, Phase};

#[derive(Debug, Args)]
pub struct PhaseArgs {
    /// Whether Dropout drops elements at random [default: as the file says in training, off otherwise]
    #[arg(long, value_enum, value_name = "MODE")]
    dropout: Option<ModeArg>,
    /// Whether BatchNormalization normalises by the statistics of the batch, and training moves the running ones [default: as the file
    /// says in training, off otherwise]
    #[arg(long, value_enum, value_name = "MODE")]
    batchnorm: Option<ModeArg>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeArg {
    /// As each node of the file says
    File,
    /// As in training
    Train,
    /// As in inference
    #[value(alias = "frozen")]
    Off,
}

impl ModeArg {
    fn mode(self) -> Mode {
        match self {
            ModeArg::File => Mode::File,
            ModeArg::Train => Mode::Train,
            ModeArg::Off => Mode::Off,
        }
    }
}

impl PhaseArgs {
    /// `default` where a flag is not given.
    pub fn phase(&self, default: Phase) -> Phase {
        Phase {
            dropout: self.dropout.map_or(default.dropout, ModeArg::mode),
            batch_norm: self.batchnorm.map_or(default.batch_norm, ModeArg::mode),
        }
    }
}
