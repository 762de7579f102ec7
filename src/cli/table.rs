//! Aligned tables for people, arrays of objects for programs.

use serde_json::{Map, Value};

/// Rows of text under named columns.
pub struct Table {
    columns: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(columns: [&'static str; N]) -> Self {
        Table { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }

    /// The rows, aligned and indented by two spaces, with a title and their number.
    pub fn text(&self, title: &str) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.columns[column].len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |cells: Vec<&str>| {
            let padded: Vec<String> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            format!("  {}\n", padded.join("  ").trim_end())
        };
        let mut out = format!("{title} ({})\n", self.rows.len());
        if !self.rows.is_empty() {
            out += &line(self.columns.clone());
        }
        self.rows.iter().for_each(|row| out += &line(row.iter().map(String::as_str).collect()));
        out
    }

    /// One object per row, with the column names as keys.
    pub fn json(&self) -> Value {
        let object = |row: &Vec<String>| {
            let pairs = self.columns.iter().zip(row).map(|(column, cell)| (column.to_string(), Value::from(cell.as_str())));
            Value::Object(pairs.collect::<Map<_, _>>())
        };
        self.rows.iter().map(object).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_under_their_names() {
        let mut table = Table::new(["name", "shape"]);
        table.row(["a".into(), "[1]".into()]);
        table.row(["weight".into(), "[]".into()]);
        assert_eq!(table.text("inputs"), "inputs (2)\n  name    shape\n  a       [1]\n  weight  []\n");
        assert_eq!(table.json()[1]["name"], "weight");
    }
}
