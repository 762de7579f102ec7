//! A program as text, for people: kernels, dispatches with the tensors that they read and write, and where the tensors lie.

use std::fmt;

use crate::program::{Access, Dispatch, Program, Region, Space};

/// Longest label of a kernel beside a dispatch, in characters; the table of kernels has all of it.
const MAX_LABEL: usize = 72;

/// A value in memory, from the dispatch that writes it to the last one that reads it.
struct Value {
    name: String,
    region: Region,
    /// Absent for what is there before the first dispatch.
    written: Option<usize>,
    read: Option<usize>,
}

/// The values of a program and, per dispatch, which of them it reads and writes.
struct Values {
    all: Vec<Value>,
    uses: Vec<(Vec<usize>, Vec<usize>)>,
}

impl Values {
    fn of(program: &Program) -> Self {
        let inputs = program.inputs.iter().chain(&program.outputs).map(|binding| (binding.name.clone(), binding.region));
        let parameters = program.parameters.iter().map(|binding| (binding.name.clone(), binding.region));
        let constants =
            program.constants.iter().enumerate().map(|(i, constant)| (format!("constant {i}"), Some(constant.region)));
        let placed = parameters.chain(inputs).chain(constants);
        let named = placed.filter_map(|(name, region)| Some(Value { name, region: region?, written: None, read: None }));
        let mut values = Values { all: named.collect(), uses: Vec::new() };
        for (index, dispatch) in program.dispatches.iter().enumerate() {
            let of = |access: Access| {
                let accesses = program.kernels.get(dispatch.kernel).map_or(&[][..], |kernel| &kernel.access);
                dispatch.regions.iter().zip(accesses).filter(move |(_, own)| **own == access).map(|(region, _)| *region)
            };
            let reads: Vec<usize> = of(Access::Read).map(|region| values.at(region)).collect();
            let writes = of(Access::ReadWrite).map(|region| values.write(region, index)).collect();
            reads.iter().for_each(|&value| values.all[value].read = Some(index));
            values.uses.push((reads, writes));
        }
        values
    }

    /// The value that lies in a region now.
    fn at(&mut self, region: Region) -> usize {
        let latest = self.all.iter().rposition(|value| value.region.overlaps(&region));
        latest.unwrap_or_else(|| self.add(region, None))
    }

    /// Only intermediate results have names of their own: elsewhere, the new value takes the place of the old one for good.
    fn write(&mut self, region: Region, dispatch: usize) -> usize {
        if region.space == Space::Scratch {
            return self.add(region, Some(dispatch));
        }
        let value = self.at(region);
        self.all[value].written = Some(dispatch);
        value
    }

    fn add(&mut self, region: Region, written: Option<usize>) -> usize {
        let number = self.all.iter().filter(|value| value.region.space == Space::Scratch).count();
        self.all.push(Value { name: format!("t{number}"), region, written, read: None });
        self.all.len() - 1
    }

    fn names(&self, values: &[usize]) -> String {
        let names: Vec<&str> = values.iter().map(|&value| self.all[value].name.as_str()).collect();
        names.join(", ")
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, kernel) in self.kernels.iter().enumerate() {
            let uses = self.dispatches.iter().filter(|d| d.kernel == index).count();
            let invocations: u32 = kernel.workgroup_size.iter().product();
            let plural = if uses == 1 { "dispatch" } else { "dispatches" };
            writeln!(f, "kernel {index}: {uses} {plural}, workgroups of {invocations}")?;
            kernel.label.split(" | ").try_for_each(|part| writeln!(f, "    {part}"))?;
        }
        let values = Values::of(self);
        writeln!(f)?;
        for (index, (dispatch, (reads, writes))) in self.dispatches.iter().zip(&values.uses).enumerate() {
            if dispatch.barrier {
                writeln!(f, "-- barrier")?;
            }
            writeln!(f, "{index:>4}  {}  ({})", self.short_label(dispatch), grid(dispatch))?;
            writeln!(f, "      {} -> {}", values.names(reads), values.names(writes))?;
        }
        writeln!(f)?;
        for Value { name, region, written, read } in &values.all {
            let Region { space, buffer, offset, size } = region;
            write!(f, "{name}: {size} bytes at {}.{buffer}+{offset}", space.name())?;
            if let Some(written) = written {
                write!(f, ", written by {written}")?;
            }
            if let Some(read) = read {
                write!(f, ", last read by {read}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Program {
    fn short_label(&self, dispatch: &Dispatch) -> String {
        let label = self.kernels.get(dispatch.kernel).map_or("", |kernel| &kernel.label);
        let short: String = label.chars().take(MAX_LABEL).collect();
        if short.len() == label.len() { short } else { format!("{short} ...") }
    }
}

/// `kernel 3, workgroups 12 x 4`
fn grid(dispatch: &Dispatch) -> String {
    let [x, y, z] = dispatch.workgroups;
    let sizes = match (y, z) {
        (1, 1) => format!("{x}"),
        (_, 1) => format!("{x} x {y}"),
        _ => format!("{x} x {y} x {z}"),
    };
    format!("kernel {}, workgroups {sizes}", dispatch.kernel)
}
