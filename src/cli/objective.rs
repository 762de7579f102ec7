//! What a command minimises: the flags that `train` and `grad` share.

use clap::Args;
use meganeura::{Loss, Objective};

#[derive(Debug, Args)]
pub struct ObjectiveArgs {
    /// cross_entropy, mse, bce, l1, huber, kl, or output: the model computes the loss itself
    #[arg(long, value_parser = parse_loss)]
    pub loss: Loss,
    /// Name of the target in the data [default: target, label or y]
    #[arg(long, value_name = "KEY")]
    target: Option<String>,
    /// The output that the loss judges, where there are several
    #[arg(long, value_name = "NAME")]
    output: Option<String>,
}

impl ObjectiveArgs {
    pub fn objective(&self) -> Objective {
        Objective { loss: self.loss, output: self.output.clone(), target: self.target.clone() }
    }
}

fn parse_loss(name: &str) -> Result<Loss, String> {
    Loss::from_name(name).map_err(|e| e.to_string())
}
