//! Which weights of a model are one weight: used several times, or stored several times.

use std::collections::HashMap;

use meganeura_ir::Tensor;

use crate::error::ImportError;
use crate::model::Model;

/// Operators that read the type of an operand, not its elements.
const TYPE_READERS: [&str; 4] = ["Shape", "Size", "CastLike", "EyeLike"];

/// Weights that are stored several times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// Groups of parameters with equal type and content.
    pub equal: Vec<Vec<String>>,
    /// Pairs of matrices of which one is the transpose of the other. Of equal parameters only the first is named.
    pub transposed: Vec<(String, String)>,
}

impl Model {
    /// Parameters whose elements several nodes read, with the number of these nodes: each is one weight, whose gradients add up.
    pub fn shared(&self) -> Vec<(&str, usize)> {
        let mut uses: HashMap<&str, usize> = HashMap::new();
        for node in self.graph.nodes().into_iter().filter(|node| !TYPE_READERS.contains(&node.op_type.as_str())) {
            let mut names: Vec<&str> = node.input.iter().map(String::as_str).collect();
            names.sort_unstable();
            names.dedup();
            names.into_iter().for_each(|name| *uses.entry(name).or_default() += 1);
        }
        let counted = self.parameters().iter().filter_map(|p| Some((p.name.as_str(), *uses.get(p.name.as_str())?)));
        counted.filter(|(_, count)| *count > 1).collect()
    }

    /// Parameters of more than one axis with equal or transposed content: copies of one weight that the exporter made, which
    /// train apart. Tensors whose elements are all the same count for nothing. Reads every weight that has as many elements as
    /// another.
    ///
    /// # Errors
    /// As [`Model::weight`].
    pub fn copies(&self) -> Result<Copies, ImportError> {
        let matrices = || self.parameters().iter().enumerate().filter(|(_, p)| p.shape.rank() > 1);
        let mut sizes: HashMap<usize, usize> = HashMap::new();
        matrices().for_each(|(_, p)| *sizes.entry(p.shape.numel()).or_default() += 1);
        let mut candidates: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
        for (index, parameter) in matrices().filter(|(_, p)| sizes.get(&p.shape.numel()).is_some_and(|count| *count > 1)) {
            if let Some(fingerprint) = fingerprint(&self.weight(&parameter.name)?) {
                candidates.entry((parameter.shape.numel(), fingerprint)).or_default().push(index);
            }
        }
        let mut groups: Vec<Vec<usize>> = candidates.into_values().filter(|group| group.len() > 1).collect();
        groups.sort();
        let mut copies = Copies::default();
        for group in groups {
            self.compare(&group, &mut copies)?;
        }
        Ok(copies)
    }

    /// Finds the copies among parameters with the same elements in whatever order.
    fn compare(&self, group: &[usize], copies: &mut Copies) -> Result<(), ImportError> {
        let name = |index: usize| &self.parameters()[index].name;
        let mut distinct: Vec<Vec<String>> = Vec::new();
        for &index in group {
            let tensor = self.weight(name(index))?;
            let mut transposed = None;
            let mut is_new = true;
            for known in &mut distinct {
                let other = self.weight(&known[0])?;
                if other == tensor {
                    known.push(name(index).clone());
                    is_new = false;
                    break;
                }
                if is_transpose(&tensor, &other) {
                    transposed = Some(known[0].clone());
                }
            }
            if is_new {
                distinct.push(vec![name(index).clone()]);
                copies.transposed.extend(transposed.map(|first| (first, name(index).clone())));
            }
        }
        copies.equal.extend(distinct.into_iter().filter(|names| names.len() > 1));
        Ok(())
    }
}

/// A number that tensors with the same elements share, whatever their order; `None` if all elements are the same.
fn fingerprint(tensor: &Tensor) -> Option<u64> {
    let mut elements = tensor.bytes().chunks_exact(tensor.dtype().size());
    let first = elements.next()?;
    if elements.clone().all(|element| element == first) {
        return None;
    }
    let mixed = |element: &[u8]| {
        let bits = element.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
        let spread = (bits ^ bits >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (spread ^ spread >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    Some(elements.fold(mixed(first), |sum, element| sum.wrapping_add(mixed(element))))
}

fn is_transpose(a: &Tensor, b: &Tensor) -> bool {
    let ([rows, columns], [m, n]) = (&a.shape()[..], &b.shape()[..]) else { return false };
    let size = a.dtype().size();
    let at = |bytes, index: usize| <[u8]>::get(bytes, index * size..(index + 1) * size);
    let (x, y) = (a.bytes(), b.bytes());
    a.dtype() == b.dtype()
        && (rows, columns) == (n, m)
        && (0..*rows).all(|r| (0..*columns).all(|c| at(x, r * columns + c) == at(y, c * rows + r)))
}
