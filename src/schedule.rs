//! Learning rates over the steps of a run, by the formulas of `torch.optim.lr_scheduler`.

mod plateau;

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

pub use plateau::{Plateau, PlateauBy, PlateauState};

/// How the learning rate changes after the warm-up. Steps count from 0 at its end; `steps` are the rest of the run where absent.
///
/// On the command line a name, and perhaps settings: `cosine`, `step:every=100,gamma=0.5`, `multi-step:at=100/200`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Decay {
    /// It does not.
    #[default]
    Constant,
    /// `LinearLR`: a straight line between two shares of the peak rate.
    Linear { start: f64, end: f64, steps: Option<u64> },
    /// `CosineAnnealingLR`: half a cosine wave, down to the rate `min`.
    Cosine { min: f64, steps: Option<u64> },
    /// `StepLR`: `gamma` times the rate before, every so many steps.
    Step { every: u64, gamma: f64 },
    /// `MultiStepLR`: `gamma` times the rate before, at each of the steps.
    MultiStep { at: Vec<u64>, gamma: f64 },
    /// `ExponentialLR`: `gamma` times the rate before, at every step.
    Exponential { gamma: f64 },
    /// `PolynomialLR`: a power of what is left of the steps, to zero.
    Polynomial { power: f64, steps: Option<u64> },
    /// `OneCycleLR` without a cycle of momentum: from `peak / div` to the peak during the share `rise` of the run, then to
    /// `peak / div / final_div`.
    OneCycle { rise: f64, anneal: Anneal, div: f64, final_div: f64 },
    /// `ReduceLROnPlateau`: `factor` times the rate before, wherever evaluations stop getting better.
    Plateau(Plateau),
}

/// A number of settings, each given by its name.
fn setting(f: &mut fmt::Formatter, name: &str, settings: &[(&str, Option<String>)]) -> fmt::Result {
    let given: Vec<String> = settings.iter().filter_map(|(key, value)| Some(format!("{key}={}", value.as_ref()?))).collect();
    let colon = if given.is_empty() { "" } else { ":" };
    write!(f, "{name}{colon}{}", given.join(","))
}

impl fmt::Display for Decay {
    /// As on the command line.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let text = |value: f64| Some(value.to_string());
        let steps = |steps: Option<u64>| steps.map(|n| n.to_string());
        match self {
            Decay::Constant => f.write_str("constant"),
            Decay::Linear { start, end, steps: n } => {
                setting(f, "linear", &[("start", text(*start)), ("end", text(*end)), ("steps", steps(*n))])
            }
            Decay::Cosine { min, steps: n } => setting(f, "cosine", &[("min", text(*min)), ("steps", steps(*n))]),
            Decay::Step { every, gamma } => setting(f, "step", &[("every", steps(Some(*every))), ("gamma", text(*gamma))]),
            Decay::MultiStep { at, gamma } => {
                let at = at.iter().map(u64::to_string).collect::<Vec<_>>().join("/");
                setting(f, "multi-step", &[("at", Some(at)), ("gamma", text(*gamma))])
            }
            Decay::Exponential { gamma } => setting(f, "exponential", &[("gamma", text(*gamma))]),
            Decay::Polynomial { power, steps: n } => setting(f, "polynomial", &[("power", text(*power)), ("steps", steps(*n))]),
            Decay::OneCycle { rise, anneal, div, final_div } => {
                let anneal = match anneal {
                    Anneal::Cosine => "cosine",
                    Anneal::Linear => "linear",
                };
                let anneal = Some(anneal.to_owned());
                let settings = [("rise", text(*rise)), ("anneal", anneal), ("div", text(*div)), ("final-div", text(*final_div))];
                setting(f, "one-cycle", &settings)
            }
            Decay::Plateau(p) => {
                let word = |word: &str| Some(word.to_owned());
                let settings = [
                    ("factor", text(p.factor)),
                    ("patience", steps(Some(p.patience))),
                    ("threshold", text(p.threshold)),
                    ("threshold-mode", word(if p.relative { "rel" } else { "abs" })),
                    ("cooldown", steps(Some(p.cooldown))),
                    ("min", text(p.min)),
                    ("eps", text(p.epsilon)),
                    ("by", word(if p.by == PlateauBy::Loss { "loss" } else { "metric" })),
                ];
                setting(f, "plateau", &settings)
            }
        }
    }
}

/// The curve between two learning rates of [`Decay::OneCycle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anneal {
    Cosine,
    Linear,
}

impl Anneal {
    fn between(self, from: f64, to: f64, progress: f64) -> f64 {
        match self {
            Anneal::Cosine => to + (from - to) / 2.0 * (1.0 + (PI * progress).cos()),
            Anneal::Linear => from + (to - from) * progress,
        }
    }
}

impl Decay {
    /// The names on the command line, each with what its settings make of it.
    const TABLE: [(&'static str, Build); 9] = [
        ("constant", |_| Ok(Decay::Constant)),
        ("linear", |s| {
            Ok(Decay::Linear { start: s.number("start", 1.0)?, end: s.number("end", 0.0)?, steps: s.count("steps")? })
        }),
        ("cosine", |s| Ok(Decay::Cosine { min: s.number("min", 0.0)?, steps: s.count("steps")? })),
        ("step", |s| Ok(Decay::Step { every: s.needed("every", Settings::count)?, gamma: s.number("gamma", 0.1)? })),
        ("multi-step", |s| Ok(Decay::MultiStep { at: s.needed("at", Settings::counts)?, gamma: s.number("gamma", 0.1)? })),
        ("exponential", |s| Ok(Decay::Exponential { gamma: s.needed("gamma", Settings::optional)? })),
        ("polynomial", |s| Ok(Decay::Polynomial { power: s.number("power", 1.0)?, steps: s.count("steps")? })),
        ("one-cycle", |s| {
            let (rise, anneal) =
                (s.number("rise", 0.3)?, s.word("anneal", &[("cosine", Anneal::Cosine), ("linear", Anneal::Linear)])?);
            Ok(Decay::OneCycle { rise, anneal, div: s.number("div", 25.0)?, final_div: s.number("final-div", 1e4)? })
        }),
        ("plateau", |s| {
            Ok(Decay::Plateau(Plateau {
                factor: s.number("factor", 0.1)?,
                patience: s.whole("patience", 10)?,
                threshold: s.number("threshold", 1e-4)?,
                relative: s.word("threshold-mode", &[("rel", true), ("abs", false)])?,
                cooldown: s.whole("cooldown", 0)?,
                min: s.number("min", 0.0)?,
                epsilon: s.number("eps", 1e-8)?,
                by: s.word("by", &[("loss", PlateauBy::Loss), ("metric", PlateauBy::Metric)])?,
            }))
        }),
    ];

    /// The learning rate `step` steps after the warm-up, of `rest` steps that the run then has.
    fn learning_rate(&self, peak: f64, step: u64, rest: u64) -> f64 {
        let t = step as f64;
        let progress = |steps: Option<u64>| t / steps.unwrap_or(rest).max(1) as f64;
        match *self {
            Decay::Constant | Decay::Plateau(_) => peak,
            Decay::Linear { start, end, steps } => peak * (start + (end - start) * progress(steps).min(1.0)),
            Decay::Cosine { min, steps } => min + (peak - min) * 0.5 * (1.0 + (PI * progress(steps)).cos()),
            Decay::Step { every, gamma } => peak * gamma.powf((step / every.max(1)) as f64),
            Decay::MultiStep { ref at, gamma } => peak * gamma.powf(at.iter().filter(|at| **at <= step).count() as f64),
            Decay::Exponential { gamma } => peak * gamma.powf(t),
            Decay::Polynomial { power, steps } => peak * (1.0 - progress(steps).min(1.0)).powf(power),
            Decay::OneCycle { rise, anneal, div, final_div } => {
                let (first, last) = (rise * rest as f64 - 1.0, rest as f64 - 1.0);
                if t < first {
                    return anneal.between(peak / div, peak, t / first);
                }
                let progress = if last > first { ((t - first) / (last - first)).min(1.0) } else { 1.0 };
                anneal.between(peak, peak / div / final_div, progress)
            }
        }
    }

    /// Whether the length of the run decides the rates.
    pub(crate) fn follows_length(&self) -> bool {
        match self {
            Decay::Linear { steps, .. } | Decay::Cosine { steps, .. } | Decay::Polynomial { steps, .. } => steps.is_none(),
            Decay::OneCycle { .. } => true,
            Decay::Constant | Decay::Step { .. } | Decay::MultiStep { .. } | Decay::Exponential { .. } | Decay::Plateau(_) => {
                false
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        let fits = match *self {
            Decay::Constant => true,
            Decay::Linear { start, end, .. } => start >= 0.0 && end >= 0.0,
            Decay::Cosine { min, .. } => min >= 0.0,
            Decay::Step { every, gamma } => every > 0 && gamma >= 0.0,
            Decay::MultiStep { gamma, .. } | Decay::Exponential { gamma } => gamma >= 0.0,
            Decay::Polynomial { power, .. } => power >= 0.0,
            Decay::OneCycle { rise, div, final_div, .. } => (0.0..=1.0).contains(&rise) && div > 0.0 && final_div > 0.0,
            Decay::Plateau(Plateau { factor, threshold, min, epsilon, .. }) => {
                (0.0..1.0).contains(&factor) && threshold >= 0.0 && min >= 0.0 && epsilon >= 0.0
            }
        };
        fits.then_some(()).ok_or_else(|| "a setting is out of its range".to_string())
    }
}

impl FromStr for Decay {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let known = || Self::TABLE.map(|(n, _)| n).join(", ");
        let (_, build) = Self::TABLE.iter().find(|(n, _)| *n == name).ok_or_else(|| format!("choose one of {}", known()))?;
        let mut settings = Settings::parse(settings)?;
        let decay = build(&mut settings)?;
        if let Some(unknown) = settings.0.keys().next() {
            return Err(format!("{name} has no setting {unknown:?}"));
        }
        decay.check().map(|()| decay)
    }
}

/// Makes a curve of the settings that it takes away.
type Build = fn(&mut Settings) -> Result<Decay, String>;

/// `key=value` pairs that are taken one by one.
struct Settings<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Settings<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let pairs = text.split(',').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| pair.split_once('=').ok_or_else(|| format!("{pair:?} is not KEY=VALUE")));
        pairs.collect::<Result<_, _>>().map(Settings)
    }

    fn optional(&mut self, key: &str) -> Result<Option<f64>, String> {
        let parse = |text: &str| text.parse::<f64>().ok().filter(|v| v.is_finite());
        self.0.remove(key).map(|text| parse(text).ok_or_else(|| format!("{key} is no number"))).transpose()
    }

    fn number(&mut self, key: &str, default: f64) -> Result<f64, String> {
        Ok(self.optional(key)?.unwrap_or(default))
    }

    fn count(&mut self, key: &str) -> Result<Option<u64>, String> {
        let parse = |text: &str| text.parse::<u64>().ok().filter(|v| *v > 0);
        self.0.remove(key).map(|text| parse(text).ok_or_else(|| format!("{key} is no count"))).transpose()
    }

    /// `A/B/C`
    fn counts(&mut self, key: &str) -> Result<Option<Vec<u64>>, String> {
        let parse = |text: &str| text.split('/').map(|part| part.parse().ok()).collect::<Option<Vec<u64>>>();
        self.0.remove(key).map(|text| parse(text).ok_or_else(|| format!("{key} is no list A/B/C of steps"))).transpose()
    }

    /// A whole number, which may be 0.
    fn whole(&mut self, key: &str, default: u64) -> Result<u64, String> {
        self.0.remove(key).map_or(Ok(default), |text| text.parse().map_err(|_| format!("{key} is no whole number")))
    }

    /// One of some words, the first by default.
    fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T); 2]) -> Result<T, String> {
        let Some(text) = self.0.remove(key) else { return Ok(words[0].1) };
        let found = words.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| *value).ok_or_else(|| format!("{key} is {} or {}", words[0].0, words[1].0))
    }

    fn needed<T>(&mut self, key: &str, read: impl FnOnce(&mut Self, &str) -> Result<Option<T>, String>) -> Result<T, String> {
        read(self, key)?.ok_or_else(|| format!("{key}= is missing"))
    }
}

/// A linear warm-up to `peak`, then `decay`.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The largest learning rate.
    pub peak: f64,
    pub decay: Decay,
    /// Steps of warm-up. The last of them runs at `peak`.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// What [`Decay::Plateau`] remembers.
    pub plateau: PlateauState,
}

impl Schedule {
    /// The learning rate of `step`, which counts from 1.
    pub fn learning_rate(&self, step: u64) -> f64 {
        self.learning_rate_of(self.peak, step)
    }

    /// The learning rate of `step` for weights whose largest is `peak`.
    pub fn learning_rate_of(&self, peak: f64, step: u64) -> f64 {
        let peak = match &self.decay {
            Decay::Plateau(plateau) => plateau.reduced(peak, &self.plateau),
            _ => peak,
        };
        if step <= self.warmup {
            return peak * step as f64 / self.warmup as f64;
        }
        self.decay.learning_rate(peak, step - self.warmup - 1, self.total.saturating_sub(self.warmup))
    }

    /// Takes the result of an evaluation into account, which only [`Decay::Plateau`] does. `rises` tells whether more is better.
    pub fn observe(&mut self, value: f64, rises: bool) {
        if let Decay::Plateau(plateau) = &self.decay {
            plateau.observe(&mut self.plateau, value, rises);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;

    use ndarray::{Array1, Array2};
    use ndarray_npy::NpzReader;

    use super::*;

    fn rates(decay: &str, peak: f64, warmup: u64, total: u64) -> Vec<f64> {
        let schedule = Schedule { peak, decay: decay.parse().unwrap(), warmup, total, plateau: PlateauState::default() };
        (1..=total).map(|step| schedule.learning_rate(step)).collect()
    }

    /// Every case of fixtures/optimizers.py.
    const CASES: [(&str, &str, u64); 14] = [
        ("constant", "constant", 0),
        ("linear", "linear", 0),
        ("linear-part", "linear:start=0.25,end=0.75,steps=12", 0),
        ("cosine", "cosine", 0),
        ("cosine-part", "cosine:min=0.05,steps=11", 0),
        ("step", "step:every=7,gamma=0.5", 0),
        ("multi-step", "multi-step:at=4/9/20,gamma=0.3", 0),
        ("exponential", "exponential:gamma=0.9", 0),
        ("polynomial", "polynomial:power=0.5", 0),
        ("polynomial-part", "polynomial:power=2,steps=20", 0),
        ("one-cycle", "one-cycle", 0),
        ("one-cycle-linear", "one-cycle:rise=0.45,anneal=linear,div=10,final-div=100", 0),
        ("warm-cosine", "cosine", 5),
        ("warm-step", "step:every=7,gamma=0.5", 5),
    ];

    #[test]
    fn every_schedule_is_that_of_pytorch() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/optimizers.npz");
        let mut reference = NpzReader::new(File::open(path).unwrap()).unwrap();
        for (case, decay, warmup) in CASES {
            let expected: Array1<f64> = reference.by_name(&format!("schedule/{case}.npy")).unwrap();
            let found = rates(decay, 0.4, warmup, 30);
            assert_eq!(found.len(), expected.len());
            for (step, (f, e)) in found.iter().zip(&expected).enumerate() {
                assert!((f - e).abs() < 1e-12, "{case}, step {step}: {f}, PyTorch has {e}");
            }
        }
        let compared = |name: &str| name == "plateau" || CASES.iter().any(|(_, decay, _)| decay.starts_with(name));
        assert!(Decay::TABLE.iter().all(|(name, _)| compared(name)));
    }

    #[test]
    fn plateaus_reduce_the_rate_where_pytorch_does() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/plateau.npz");
        let mut reference = NpzReader::new(File::open(path).unwrap()).unwrap();
        let (falling, rising): (Array1<f64>, Array1<f64>) =
            (reference.by_name("falling.npy").unwrap(), reference.by_name("rising.npy").unwrap());
        for (case, decay) in [
            ("default", "plateau"),
            ("short", "plateau:factor=0.5,patience=2"),
            ("absolute", "plateau:factor=0.3,patience=1,threshold=0.05,threshold-mode=abs"),
            ("cooldown", "plateau:factor=0.7,patience=1,threshold=0.1,cooldown=3,min=1e-3"),
            ("epsilon", "plateau:factor=0.5,patience=0,eps=1e-3"),
            ("rising", "plateau:factor=0.5,patience=1,threshold=0.02"),
            ("rising-absolute", "plateau:factor=0.5,patience=0,threshold=0.01,threshold-mode=abs"),
        ] {
            let expected: Array2<f64> = reference.by_name(&format!("rates/{case}.npy")).unwrap();
            let (decay, plateau) = (decay.parse().unwrap(), PlateauState::default());
            let mut schedule = Schedule { peak: 0.4, decay, warmup: 0, total: 100, plateau };
            let rises = case.starts_with("rising");
            let values = if rises { &rising } else { &falling };
            for (index, (value, expected)) in values.iter().zip(expected.rows()).enumerate() {
                schedule.observe(*value, rises);
                // Through a checkpoint, after which all goes on as before.
                let stored = serde_json::to_string(&schedule.plateau).unwrap();
                schedule.plateau = serde_json::from_str(&stored).unwrap();
                let found = [0.4, 0.003].map(|peak| schedule.learning_rate_of(peak, index as u64 + 2));
                assert_eq!(found.as_slice(), expected.as_slice().unwrap(), "{case}, evaluation {index}");
            }
        }
    }

    #[test]
    fn every_schedule_reads_what_it_prints() {
        let plateau = "plateau:factor=0.5,patience=3,threshold=0.25,threshold-mode=abs,cooldown=1,min=0.125,eps=0.5,by=metric";
        for text in CASES.iter().map(|(_, text, _)| *text).chain([plateau, "plateau"]) {
            let decay: Decay = text.parse().unwrap();
            assert_eq!(decay.to_string().parse(), Ok(decay.clone()), "{decay}");
        }
        assert_eq!(plateau.parse::<Decay>().unwrap().to_string(), plateau);
    }

    #[test]
    fn warmup_rises_in_equal_steps_to_the_peak() {
        assert_eq!(rates("constant", 2.0, 4, 6), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]);
    }

    #[test]
    fn steps_past_the_end_stay_at_the_last_rate_of_the_curve() {
        let (decay, plateau) = ("linear".parse().unwrap(), PlateauState::default());
        let schedule = Schedule { peak: 1.0, decay, warmup: 0, total: 2, plateau };
        assert_eq!(schedule.learning_rate(10), 0.0);
    }

    #[test]
    fn runs_of_a_step_or_two_have_finite_rates() {
        for (_, decay, _) in CASES {
            for (warmup, total) in [(0, 1), (0, 2), (1, 1), (3, 2)] {
                assert!(rates(decay, 1.0, warmup, total).iter().all(|r| (0.0..=1.0).contains(r)), "{decay}");
            }
        }
    }

    #[test]
    fn wrong_settings_are_named() {
        for (text, part) in [
            ("sine", "choose one of constant, linear"),
            ("step", "every= is missing"),
            ("step:every=0", "every is no count"),
            ("step:every=5,gamma=x", "gamma is no number"),
            ("multi-step:at=5;6", "A/B/C"),
            ("cosine:max=1", "no setting \"max\""),
            ("exponential:gamma=-1", "out of its range"),
            ("one-cycle:anneal=square", "cosine or linear"),
            ("linear:end", "KEY=VALUE"),
        ] {
            let message = text.parse::<Decay>().unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
