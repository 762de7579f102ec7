//! What a command minimises: the flags that `train` and `grad` share.

use std::sync::Arc;

use clap::Args;
use meganeura::{Loss, Objective};

use super::Failure;

#[derive(Debug, Args)]
pub struct ObjectiveArgs {
    /// cross_entropy, mse, bce, l1, huber, smooth_l1, kl, or output: the model computes the loss itself
    #[arg(long, value_parser = parse_loss)]
    pub loss: Loss,
    /// Name of the target in the data [default: target, label or y]
    #[arg(long, value_name = "KEY")]
    target: Option<String>,
    /// The output that the loss judges, where there are several
    #[arg(long, value_name = "NAME")]
    output: Option<String>,
    /// The share of the uniform distribution in each target, of cross_entropy [default: 0]
    #[arg(long, value_name = "X")]
    label_smoothing: Option<f64>,
    /// The class that does not count, of cross_entropy [default: -100]
    #[arg(long, value_name = "CLASS", allow_hyphen_values = true)]
    ignore_index: Option<i64>,
    /// A weight for each class, of cross_entropy: numbers with commas between them, or a text file of numbers
    #[arg(long, value_name = "LIST|FILE", value_parser = parse_numbers)]
    class_weights: Option<Arc<[f64]>>,
    /// The weight of positive targets, of bce: one number, or one for each position on the last axis; a list or a text file
    #[arg(long, value_name = "LIST|FILE", value_parser = parse_numbers)]
    pos_weight: Option<Arc<[f64]>>,
    /// The distance at which huber and smooth_l1 turn from a square into a line [default: 1]
    #[arg(long, value_name = "X")]
    delta: Option<f64>,
}

impl ObjectiveArgs {
    /// # Errors
    /// A flag means nothing to the loss.
    pub fn objective(&self) -> Result<Objective, Failure> {
        Ok(Objective { loss: self.loss()?, output: self.output.clone(), target: self.target.clone() })
    }

    fn loss(&self) -> Result<Loss, Failure> {
        let mut loss = self.loss.clone();
        let mut unused = vec![
            ("label-smoothing", self.label_smoothing.is_some()),
            ("ignore-index", self.ignore_index.is_some()),
            ("class-weights", self.class_weights.is_some()),
            ("pos-weight", self.pos_weight.is_some()),
            ("delta", self.delta.is_some()),
        ];
        let used: &[&str] = match &mut loss {
            Loss::CrossEntropy { label_smoothing, ignore_index, class_weights } => {
                *label_smoothing = self.label_smoothing.unwrap_or(*label_smoothing);
                *ignore_index = self.ignore_index.or(*ignore_index);
                *class_weights = self.class_weights.clone();
                &["label-smoothing", "ignore-index", "class-weights"]
            }
            Loss::BceWithLogits { pos_weight } => {
                *pos_weight = self.pos_weight.clone();
                &["pos-weight"]
            }
            Loss::Huber { delta: distance } | Loss::SmoothL1 { beta: distance } => {
                *distance = self.delta.unwrap_or(*distance);
                &["delta"]
            }
            Loss::Mse | Loss::L1 | Loss::Kl | Loss::Output => &[],
        };
        unused.retain(|(flag, given)| *given && !used.contains(flag));
        match unused.first() {
            Some((flag, _)) => Err(Failure::input(format!("--{flag} means nothing to the loss {}", loss.name()))),
            None => Ok(loss),
        }
    }
}

pub fn parse_loss(name: &str) -> Result<Loss, String> {
    Loss::from_name(name).map_err(|e| e.to_string())
}

/// Numbers with commas between them, or the name of a file of numbers with commas or white space between them.
fn parse_numbers(text: &str) -> Result<Arc<[f64]>, String> {
    let parse = |text: &str| -> Option<Arc<[f64]>> {
        let parts = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|part| !part.is_empty());
        let numbers: Vec<f64> = parts.map(|part| part.parse().ok()).collect::<Option<_>>()?;
        (!numbers.is_empty()).then(|| numbers.into())
    };
    if let Some(numbers) = parse(text) {
        return Ok(numbers);
    }
    let content =
        std::fs::read_to_string(text).map_err(|e| format!("{text} is neither a list of numbers nor a readable file: {e}"))?;
    parse(&content).ok_or_else(|| format!("{text} is not a file of numbers"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        objective: ObjectiveArgs,
    }

    fn loss(flags: &[&str]) -> Result<Loss, String> {
        let flags = Flags::try_parse_from(["grad", "--loss"].iter().chain(flags)).map_err(|e| e.to_string())?;
        flags.objective.objective().map(|objective| objective.loss).map_err(|failure| failure.message)
    }

    #[test]
    fn flags_reach_the_loss_that_they_belong_to() {
        let class_weights = Some(Arc::from([1.0, 0.5]));
        let expected = Loss::CrossEntropy { label_smoothing: 0.1, ignore_index: Some(-1), class_weights };
        let flags = ["cross_entropy", "--label-smoothing", "0.1", "--ignore-index", "-1", "--class-weights", "1,0.5"];
        assert_eq!(loss(&flags), Ok(expected));
        assert_eq!(loss(&["smooth_l1", "--delta", "0.5"]), Ok(Loss::SmoothL1 { beta: 0.5 }));
        let expected = Loss::BceWithLogits { pos_weight: Some(Arc::from([3.0])) };
        assert_eq!(loss(&["bce", "--pos-weight", "3"]), Ok(expected));
    }

    #[test]
    fn flags_of_another_loss_are_refused() {
        for flags in [["mse", "--delta", "1"], ["bce", "--class-weights", "1"], ["huber", "--ignore-index", "2"]] {
            let message = loss(&flags).unwrap_err();
            assert!(message.contains(flags[1]) && message.contains(flags[0]), "{message}");
        }
    }

    #[test]
    fn numbers_come_from_a_list_or_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.txt");
        std::fs::write(&path, "1.5 2\n3\n").unwrap();
        assert_eq!(parse_numbers(path.to_str().unwrap()).unwrap().as_ref(), [1.5, 2.0, 3.0]);
        assert_eq!(parse_numbers("1, 2").unwrap().as_ref(), [1.0, 2.0]);
        std::fs::write(&path, "1.5 two").unwrap();
        for bad in [path.to_str().unwrap(), "absent", "", "1,two"] {
            assert!(parse_numbers(bad).is_err(), "{bad:?}");
        }
    }
}
