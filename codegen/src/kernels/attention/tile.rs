//! Tiles of rows in workgroup memory: how they get there, and their products.
//!
//! A workgroup's invocations form a grid. Each computes the elements of a product of two tiles at its own rows of the one and of the other,
//! which are as far apart as the grid is wide, so that neighbours read neighbouring rows. All is read as vectors of four along the rows.

use std::ops::Range;

use meganeura_ir::NodeId;

use super::{Family, Place};
use crate::attention::Attention;
use crate::body::{ExprId, Scalar, SlotId, Stmt};
use crate::index::Index;
use crate::kernels::KernelEmitter;

/// Elements of a vector.
pub const VECTOR: usize = 4;

/// Words from one row of a tile to the next: an odd number of vectors, so that rows start in different banks.
pub fn pitch(columns: usize) -> usize {
    (columns.div_ceil(VECTOR) | 1) * VECTOR
}

/// The workgroup memory of a kernel: one array, so that kernels which share a dispatch share it. Stages of a kernel take two halves of it in
/// turn, so that no invocation waits until the others are done with a stage.
pub struct Memory {
    array: SlotId,
    /// Words of each half.
    half: usize,
}

impl Memory {
    pub fn new(kernel: &mut KernelEmitter, half: usize, words: usize) -> Self {
        Memory { array: kernel.e.b.shared_vectors(Scalar::F32, words as u32), half }
    }

    /// Tiles of these rows and columns for a stage.
    fn stage(&self, stage: usize, shapes: &[(usize, usize)]) -> Vec<Tile> {
        self.tiles(stage % 2 * self.half, shapes)
    }

    /// The tile behind both halves.
    pub fn behind(&self, (rows, columns): (usize, usize)) -> Tile {
        Tile { array: self.array, base: 2 * self.half, rows, pitch: pitch(columns) }
    }

    fn tiles(&self, mut base: usize, shapes: &[(usize, usize)]) -> Vec<Tile> {
        let tile = |&(rows, columns): &(usize, usize)| {
            let tile = Tile { array: self.array, base, rows, pitch: pitch(columns) };
            base += rows * tile.pitch;
            tile
        };
        shapes.iter().map(tile).collect()
    }
}

/// Rows in workgroup memory, in words.
#[derive(Clone, Copy)]
pub struct Tile {
    array: SlotId,
    base: usize,
    pub rows: usize,
    pitch: usize,
}

impl Tile {
    fn at(&self, row: &Index, column: &Index) -> Index {
        row.scale(self.pitch as i64).add(column).shift(self.base as i64)
    }

    /// The first vector of a row.
    fn vector(&self, row: &Index) -> Index {
        row.scale((self.pitch / VECTOR) as i64).shift((self.base / VECTOR) as i64)
    }
}

/// An invocation's place in the grid of its workgroup.
pub struct Seat {
    pub local: Index,
    pub invocations: usize,
    pub row: Index,
    pub column: Index,
    /// Rows and columns of the grid.
    pub grid: (usize, usize),
}

impl Seat {
    /// The rows of a tile that are an invocation's own as the left side of a product.
    pub fn rows(&self, tile: usize) -> Vec<Index> {
        (0..tile / self.grid.0).map(|i| self.row.shift((i * self.grid.0) as i64)).collect()
    }

    /// Those that are its own as the right side.
    pub fn columns(&self, tile: usize) -> Vec<Index> {
        (0..tile / self.grid.1).map(|i| self.column.shift((i * self.grid.1) as i64)).collect()
    }

    /// The places in a result's row of `size` columns that are its own: vectors.
    pub fn elements(&self, size: usize) -> Vec<Index> {
        let vectors = self.vectors(size).into_iter().map(|vector| vector.scale(VECTOR as i64));
        vectors.flat_map(|first| (0..VECTOR as i64).map(move |i| first.shift(i))).collect()
    }

    fn vectors(&self, size: usize) -> Vec<Index> {
        self.columns(size.div_ceil(VECTOR).next_multiple_of(self.grid.1))
    }
}

/// Columns of a result's row from one vector of an invocation to its next.
pub fn vector_stride(lanes: usize) -> usize {
    VECTOR * lanes
}

/// Whether the halves of a result's rows lie interleaved, two columns of either in turn: where an invocation then has both columns of each pair
/// that a rotation turns, and else would not.
pub fn interleaves(size: usize, lanes: usize) -> bool {
    size.is_multiple_of(2 * VECTOR) && !(size / 2).is_multiple_of(vector_stride(lanes))
}

/// The column at a place of interleaved halves.
fn interleaved(place: &Index, size: usize) -> Index {
    let vector = VECTOR as i64;
    let in_vector = place.rem(vector);
    place.div(vector).scale(vector / 2).add(&in_vector.rem(2)).add(&in_vector.div(2).scale(size as i64 / 2))
}

/// Where an element lies, by row and column.
pub type ElementAt<'a> = &'a dyn Fn(&Attention, &Index, &Index) -> Vec<Index>;

/// Rows of a tensor, times a factor.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub node: NodeId,
    pub at: ElementAt<'a>,
    pub rows: usize,
    pub size: usize,
    pub factor: f64,
}

impl<'a> Source<'a> {
    /// `count` rows from `first` on, and these columns of them.
    pub fn part(&self, first: &Index, count: usize, columns: &Range<usize>) -> Load<'a> {
        Load { source: *self, first: first.clone(), count, width: columns.len(), columns: columns.clone(), interleaved: false }
    }
}

/// A part of a source that becomes a tile: `count` rows from `first` on, and a range of columns. Rows past the end are the last one.
#[derive(Clone)]
pub struct Load<'a> {
    pub source: Source<'a>,
    pub first: Index,
    pub count: usize,
    pub columns: Range<usize>,
    /// Columns of the tile: not fewer than are loaded.
    pub width: usize,
    /// Whether they are those of a result with interleaved halves.
    pub interleaved: bool,
}

/// An element of a tile that an invocation brings there, where the condition holds.
struct Spot {
    row: Index,
    column: Index,
    active: Option<ExprId>,
}

impl Family<'_, '_> {
    pub fn barrier(&mut self) {
        self.kernel.e.b.stmt(Stmt::Barrier);
    }

    /// The columns of a result's row of `size` columns that are an invocation's own.
    pub fn result_columns(&mut self, seat: &Seat, size: usize) -> Vec<Place> {
        let halves = interleaves(size, seat.grid.1);
        let column = |this: &mut Self, place: Index| {
            let within = this.kernel.e.b.below(&place, size);
            let column = if halves { interleaved(&place, size) } else { place };
            Place { at: column.bounded(0, size as i64 - 1), within }
        };
        seat.elements(size).into_iter().map(|place| column(self, place)).collect()
    }

    /// The row or column at `at` of `count`, which may be past the end.
    pub fn place(&mut self, at: Index, count: usize) -> Place {
        let within = self.kernel.e.b.below(&at, count);
        Place { at: at.bounded(0, count as i64 - 1), within }
    }

    /// The elements of `columns` columns that an invocation brings: neighbours bring neighbours.
    fn spots(&mut self, seat: &Seat, rows: usize, columns: usize) -> Vec<Spot> {
        let (elements, step) = (rows * columns, seat.invocations);
        (0..elements)
            .step_by(step)
            .map(|start| {
                let linear = seat.local.shift(start as i64);
                let active = self.kernel.e.b.below(&linear, elements);
                let (row, column) = if step % columns == 0 {
                    (seat.local.div(columns as i64).shift((start / columns) as i64), seat.local.rem(columns as i64))
                } else {
                    (linear.div(columns as i64), linear.rem(columns as i64))
                };
                Spot { row, column, active }
            })
            .collect()
    }

    /// Loads the elements that an invocation brings.
    pub fn fetch(&mut self, seat: &Seat, loads: &[Load]) -> Vec<ExprId> {
        loads.iter().flat_map(|load| self.fetch_one(seat, load)).collect()
    }

    fn fetch_one(&mut self, seat: &Seat, load: &Load) -> Vec<ExprId> {
        let (source, columns) = (&load.source, load.columns.len());
        let spots = self.spots(seat, load.count, columns.next_multiple_of(VECTOR));
        spots
            .into_iter()
            .map(|spot| {
                let row = self.kernel.e.b.clamped(load.first.add(&spot.row), source.rows);
                let within = self.kernel.e.b.below(&spot.column, columns);
                let column = if load.interleaved { interleaved(&spot.column, columns) } else { spot.column };
                let column = self.kernel.e.b.clamped(column, columns).shift(load.columns.start as i64);
                let at = (source.at)(&self.spec, &row, &column);
                let value = self.kernel.e.eval(source.node, &at);
                let value = self.scaled(value, source.factor);
                self.select(within, value, 0.0)
            })
            .collect()
    }

    /// Stores what was loaded for a stage, and returns its tiles: those of the loads, and more of these shapes.
    pub fn put(&mut self, seat: &Seat, stage: usize, loads: &[Load], values: &[ExprId], more: &[(usize, usize)]) -> Vec<Tile> {
        let shapes: Vec<_> = loads.iter().map(|load| (load.count, load.width)).chain(more.iter().copied()).collect();
        let Some(tiles) = self.memory.as_ref().map(|memory| memory.stage(stage, &shapes)) else { return Vec::new() };
        let mut values = values.iter();
        for (load, &tile) in loads.iter().zip(&tiles) {
            for spot in self.spots(seat, load.count, load.columns.len().next_multiple_of(VECTOR)) {
                let Some(&value) = values.next() else { continue };
                if spot.active.is_some() {
                    self.kernel.e.b.begin_if();
                }
                self.put_one(tile, &spot.row, &spot.column, value);
                if let Some(active) = spot.active {
                    self.kernel.e.b.end_if(active);
                }
            }
        }
        tiles
    }

    pub fn put_one(&mut self, tile: Tile, row: &Index, column: &Index, value: ExprId) {
        let b = &mut self.kernel.e.b;
        let index = b.index(&tile.at(row, column));
        b.stmt(Stmt::StoreShared { array: tile.array, index, value });
    }

    /// The first `count` elements of a row.
    pub fn row(&mut self, tile: Tile, row: &Index, count: usize) -> Vec<ExprId> {
        (0..count / VECTOR).flat_map(|i| self.vector(tile, &tile.vector(row).shift(i as i64))).collect()
    }

    fn vector(&mut self, tile: Tile, at: &Index) -> [ExprId; VECTOR] {
        let b = &mut self.kernel.e.b;
        let index = b.index(at);
        b.load_shared_vector(tile.array, index)
    }

    pub fn accumulators(&mut self, count: usize) -> Vec<SlotId> {
        let zero = self.number(0.0);
        (0..count).map(|_| self.kernel.e.b.declare(zero)).collect()
    }

    /// Adds the products of an invocation's rows of both tiles over `size` columns, row by row.
    pub fn add_products(&mut self, seat: &Seat, sums: &[SlotId], (lhs, rhs): (Tile, Tile), size: usize) {
        let (rows, columns) = (seat.rows(lhs.rows), seat.columns(rhs.rows));
        let (token, k) = self.begin_for(size.div_ceil(VECTOR), 1);
        let right: Vec<_> = columns.iter().map(|column| self.vector(rhs, &rhs.vector(column).add(&k))).collect();
        for (row, sums) in rows.iter().zip(sums.chunks(columns.len())) {
            let left = self.vector(lhs, &lhs.vector(row).add(&k));
            for (i, &x) in left.iter().enumerate() {
                for (&sum, y) in sums.iter().zip(&right) {
                    self.add_to(sum, x, y[i]);
                }
            }
        }
        self.kernel.e.b.end_for(token);
    }

    /// Adds to an invocation's elements of a result of `size` columns the product of the weights, whose columns are the rows of the tile.
    pub fn add_weighted(&mut self, seat: &Seat, sums: &[SlotId], weights: Tile, (tile, size): (Tile, usize)) {
        let (rows, vectors) = (seat.rows(weights.rows), seat.vectors(size));
        let (token, k) = self.begin_for(tile.rows / VECTOR, 1);
        let left: Vec<_> = rows.iter().map(|row| self.vector(weights, &weights.vector(row).add(&k))).collect();
        for i in 0..VECTOR {
            let row = tile.vector(&k.scale(VECTOR as i64).shift(i as i64));
            let right: Vec<ExprId> = vectors.iter().flat_map(|vector| self.vector(tile, &row.add(vector))).collect();
            for (x, sums) in left.iter().zip(sums.chunks(right.len())) {
                for (&sum, &y) in sums.iter().zip(&right) {
                    self.add_to(sum, x[i], y);
                }
            }
        }
        self.kernel.e.b.end_for(token);
    }
}
