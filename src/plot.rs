//! The loss curve of a run as an SVG picture.

use plotters::prelude::*;

/// Width and height in pixels.
const SIZE: (u32, u32) = (960, 540);
/// More points than this are averaged in groups: a picture has no room for them.
const MAX_POINTS: usize = 2000;
const TRAINING: RGBColor = RGBColor(31, 119, 180);
const EVALUATION: RGBColor = RGBColor(214, 90, 30);

/// The curve cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the loss curve: {0}")]
pub struct PlotError(String);

/// An SVG document with the training loss and, where there are any, the evaluation losses: `(step, loss)`, by step.
pub fn loss_curve(training: &[(u64, f64)], evaluation: &[(u64, f64)]) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw(&mut svg, &thin(training), evaluation).map_err(|e| PlotError(e.to_string()))?;
    Ok(svg)
}

fn draw(svg: &mut String, training: &[(u64, f64)], evaluation: &[(u64, f64)]) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let points = || training.iter().chain(evaluation).filter(|(_, loss)| loss.is_finite());
    let last = points().map(|p| p.0).max().unwrap_or(1).max(1);
    let (low, high) = points().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), p| (l.min(p.1), h.max(p.1)));
    let (low, high) = if low <= high { (low.min(0.0), high) } else { (0.0, 1.0) };
    let margin = ((high - low) * 0.05).max(f64::MIN_POSITIVE.sqrt());
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0..last, low..high + margin)?;
    chart.configure_mesh().x_desc("step").y_desc("loss").light_line_style(WHITE).max_light_lines(1).draw()?;
    for (label, points, color) in [("training", training, TRAINING), ("evaluation", evaluation, EVALUATION)] {
        if points.is_empty() {
            continue;
        }
        let finite = points.iter().copied().filter(|(_, loss)| loss.is_finite());
        chart
            .draw_series(LineSeries::new(finite, color.stroke_width(2)))?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
    drop(chart);
    area.present()?;
    Ok(())
}

/// At most [`MAX_POINTS`] points: each the mean loss of a group of neighbours, at the group's last step.
fn thin(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let group = points.len().div_ceil(MAX_POINTS).max(1);
    let mean = |g: &[(u64, f64)]| (g[g.len() - 1].0, g.iter().map(|p| p.1).sum::<f64>() / g.len() as f64);
    points.chunks(group).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_curves_and_their_axes_are_drawn() {
        let training: Vec<(u64, f64)> = (1..=50).map(|s| (s, 1.0 / s as f64)).collect();
        let svg = loss_curve(&training, &[(25, 0.1), (50, 0.05)]).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for text in ["training", "evaluation", "step", "loss"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.matches("<polyline").count() >= 2);
    }

    #[test]
    fn runs_without_steps_or_with_one_step_or_equal_losses_are_drawn() {
        for training in [vec![], vec![(1, 0.0)], vec![(1, 2.0), (2, 2.0)], vec![(1, f64::NAN)]] {
            loss_curve(&training, &[]).unwrap();
        }
    }

    #[test]
    fn long_runs_are_averaged_in_groups() {
        let points: Vec<(u64, f64)> = (1..=4001).map(|s| (s, s as f64)).collect();
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS);
        assert_eq!(thinned[0], (3, 2.0));
        assert_eq!(thinned.last().unwrap().0, 4001);
    }
}
