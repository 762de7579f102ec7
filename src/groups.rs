//! Groups of parameters that train with a learning rate or weight decay of their own.

use std::fmt;
use std::str::FromStr;

use glob::Pattern;
use meganeura_autodiff::Optimizer;

use crate::error::Error;

/// What is particular to the weights whose name matches. Of several groups that match, the first counts.
///
/// On the command line `GLOB:SETTINGS` with `lr=X` or, as a multiple of the run's, `lr=Xx`, and `weight-decay=X`.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    pub pattern: Pattern,
    pub learning_rate: Option<GroupRate>,
    pub weight_decay: Option<f64>,
}

/// The largest learning rate of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupRate {
    Absolute(f64),
    /// Of the run's largest.
    Multiple(f64),
}

impl GroupRate {
    fn of(self, peak: f64) -> f64 {
        match self {
            GroupRate::Absolute(rate) => rate,
            GroupRate::Multiple(share) => share * peak,
        }
    }
}

impl FromStr for ParameterGroup {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write GLOB:SETTINGS, for instance head.*:lr=10x,weight-decay=0";
        let (pattern, settings) = text.rsplit_once(':').ok_or(FORM)?;
        let pattern = Pattern::new(pattern).map_err(|e| format!("{pattern:?}: {e}"))?;
        let mut group = ParameterGroup { pattern, learning_rate: None, weight_decay: None };
        for setting in settings.split(',') {
            match setting.split_once('=').ok_or(FORM)? {
                ("lr", value) => {
                    group.learning_rate = Some(match value.strip_suffix('x') {
                        Some(share) => GroupRate::Multiple(not_negative(share)?),
                        None => GroupRate::Absolute(not_negative(value)?),
                    })
                }
                ("weight-decay", value) => group.weight_decay = Some(not_negative(value)?),
                (key, _) => return Err(format!("a group has no setting {key:?}: {FORM}")),
            }
        }
        Ok(group)
    }
}

impl fmt::Display for ParameterGroup {
    /// As on the command line.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let rate = self.learning_rate.map(|rate| match rate {
            GroupRate::Absolute(rate) => format!("lr={rate}"),
            GroupRate::Multiple(share) => format!("lr={share}x"),
        });
        let decay = self.weight_decay.map(|decay| format!("weight-decay={decay}"));
        let settings: Vec<String> = rate.into_iter().chain(decay).collect();
        write!(f, "{}:{}", self.pattern, settings.join(","))
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    let value = text.trim().parse::<f64>().ok().filter(|v| v.is_finite() && *v >= 0.0);
    value.ok_or_else(|| format!("{text:?} is not a number of at least 0"))
}

/// Weights that train alike.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedGroup {
    pub optimizer: Optimizer,
    /// The largest of the schedule.
    pub learning_rate: f64,
    pub weights: Vec<String>,
}

/// How weights are told apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grouping<'a> {
    pub optimizer: Optimizer,
    pub learning_rate: f64,
    pub groups: &'a [ParameterGroup],
    /// Whether weights of at most one dimension have no weight decay where their group gives none.
    pub no_decay_norms: bool,
}

impl Grouping<'_> {
    /// Divides weights, given with their ranks, into as few groups as there are different settings.
    ///
    /// # Errors
    /// The pattern of a group matches no weight.
    pub fn divide(&self, weights: &[(&str, usize)]) -> Result<Vec<TrainedGroup>, Error> {
        if let Some(group) = self.groups.iter().find(|group| !weights.iter().any(|(name, _)| group.pattern.matches(name))) {
            let examples = weights.iter().take(3).map(|(name, _)| format!("{name:?}")).collect();
            return Err(Error::NoMatch { pattern: group.pattern.as_str().to_string(), examples });
        }
        let mut divided: Vec<TrainedGroup> = Vec::new();
        for &(name, rank) in weights {
            let group = self.groups.iter().find(|group| group.pattern.matches(name));
            let learning_rate = group.and_then(|g| g.learning_rate).map_or(self.learning_rate, |r| r.of(self.learning_rate));
            let usual = if self.no_decay_norms && rank <= 1 { 0.0 } else { self.optimizer.weight_decay() };
            let optimizer = self.optimizer.with_weight_decay(group.and_then(|g| g.weight_decay).unwrap_or(usual));
            match divided.iter_mut().find(|d| d.optimizer == optimizer && d.learning_rate == learning_rate) {
                Some(alike) => alike.weights.push(name.to_string()),
                None => divided.push(TrainedGroup { optimizer, learning_rate, weights: vec![name.to_string()] }),
            }
        }
        Ok(divided)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: [(&str, usize); 4] = [("conv.weight", 4), ("conv.bias", 1), ("head.weight", 2), ("head.bias", 1)];

    /// `(learning rate, weight decay, names)` of each group.
    fn divide(groups: &[&str], no_decay_norms: bool) -> Vec<(f64, f64, Vec<String>)> {
        let groups: Vec<ParameterGroup> = groups.iter().map(|text| text.parse().unwrap()).collect();
        let optimizer = Optimizer::from_name("adamw").unwrap();
        let grouping = Grouping { optimizer, learning_rate: 0.5, groups: &groups, no_decay_norms };
        let divided = grouping.divide(&WEIGHTS).unwrap();
        divided.into_iter().map(|g| (g.learning_rate, g.optimizer.weight_decay(), g.weights)).collect()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn without_groups_all_weights_are_one() {
        let all: Vec<&str> = WEIGHTS.iter().map(|(name, _)| *name).collect();
        assert_eq!(divide(&[], false), [(0.5, 0.01, names(&all))]);
    }

    #[test]
    fn norms_and_biases_do_not_decay_on_request() {
        let found = divide(&[], true);
        let expected = [(0.5, 0.01, ["conv.weight", "head.weight"]), (0.5, 0.0, ["conv.bias", "head.bias"])];
        assert_eq!(found, expected.map(|(lr, decay, weights)| (lr, decay, names(&weights))));
    }

    #[test]
    fn the_first_group_that_matches_counts() {
        let found = divide(&["head.bias:weight-decay=0.3", "head.*:lr=10x", "conv.weight:lr=1e-3"], true);
        let expected =
            [(1e-3, 0.01, "conv.weight"), (0.5, 0.0, "conv.bias"), (5.0, 0.01, "head.weight"), (0.5, 0.3, "head.bias")];
        assert_eq!(found, expected.map(|(lr, decay, weight)| (lr, decay, names(&[weight]))));
    }

    #[test]
    fn names_with_colons_and_wrong_settings() {
        let group: ParameterGroup = "dense/kernel:0:lr=0".parse().unwrap();
        assert!(group.pattern.matches("dense/kernel:0") && group.learning_rate == Some(GroupRate::Absolute(0.0)));
        for text in ["head", "head:", "head:lr", "head:lr=-1", "head:lr=xx", "head:momentum=1", "[:lr=1"] {
            assert!(text.parse::<ParameterGroup>().is_err(), "{text}");
        }
        let groups = ["absent.*:lr=1".parse().unwrap()];
        let optimizer = Optimizer::from_name("sgd").unwrap();
        let grouping = Grouping { optimizer, learning_rate: 1.0, groups: &groups, no_decay_norms: false };
        assert!(matches!(grouping.divide(&WEIGHTS), Err(Error::NoMatch { .. })));
    }
}
