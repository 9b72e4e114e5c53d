//! The tensors of one call after the other, in the same memory.

use std::ops::Range;

use crate::geometry::Size;
use crate::model::memory::{Block, HostMemory, ImageBatch};

/// A message that holds one image of a call.
pub trait Image {
    /// Its tensor, flat; what is missing of it is zero.
    fn values(&self) -> &[f32];
}

/// Images of one batch after the other as the tensors of calls.
pub struct Stack {
    block: Block,
    /// Images of the batch in hand that the memory holds already.
    holds: Option<Range<usize>>,
}

impl Stack {
    /// In that memory.
    pub fn new(memory: &HostMemory) -> Self {
        Self { block: memory.block(), holds: None }
    }

    /// Another batch is in hand: nothing of the last one counts.
    pub fn forget(&mut self) {
        self.holds = None;
    }

    /// Images `range` of the batch in hand as `[n, 3, height, width]`; copied only where they are not there already.
    pub fn of<T: Image>(&mut self, batch: &[T], range: Range<usize>, size: Size) -> &dyn ImageBatch {
        if self.holds.as_ref() != Some(&range) {
            self.holds = None;
            let each = 3 * size.pixels() as usize;
            let places = self.block.room(range.len(), size).chunks_exact_mut(each.max(1));
            for (place, image) in places.zip(&batch[range.clone()]) {
                let values = image.values();
                let (filled, rest) = place.split_at_mut(values.len().min(each));
                filled.copy_from_slice(&values[..filled.len()]);
                rest.fill(0.0);
            }
            self.holds = Some(range);
        }
        &self.block
    }

    /// One image of nothing but zeros.
    pub fn blank(&mut self, size: Size) -> &dyn ImageBatch {
        self.holds = None;
        self.block.room(1, size).fill(0.0);
        &self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Image for Vec<f32> {
        fn values(&self) -> &[f32] {
            self
        }
    }

    const SIZE: Size = Size::new(2, 1);

    #[test]
    fn a_stack_uses_its_memory_again_and_leaves_nothing_of_the_last_batch() {
        let mut stack = Stack::new(&HostMemory::default());
        let first = stack.of(&[vec![1.0; 6], vec![2.0; 6]], 0..2, SIZE).images();
        assert_eq!(first.as_slice().unwrap()[5..7], [1.0, 2.0]);
        let place = first.as_ptr();
        stack.forget();
        let second = stack.of(&[vec![3.0; 6], vec![]], 0..2, SIZE).images();
        assert_eq!((second.as_ptr(), second.sum()), (place, 18.0));
        assert_eq!(stack.blank(SIZE).images().sum(), 0.0);
    }

    #[test]
    fn what_is_there_is_not_copied_again_and_a_part_of_it_is() {
        let mut stack = Stack::new(&HostMemory::default());
        let mut batch = [vec![1.0; 6], vec![2.0; 6]];
        assert_eq!(stack.of(&batch, 0..2, SIZE).images().sum(), 18.0);
        batch[0].fill(9.0);
        assert_eq!(stack.of(&batch, 0..2, SIZE).images().sum(), 18.0, "it is there");
        assert_eq!(stack.of(&batch, 1..2, SIZE).images().sum(), 12.0);
        assert_eq!(stack.of(&batch, 0..1, SIZE).images().sum(), 54.0);
        stack.blank(SIZE);
        assert_eq!(stack.of(&batch, 0..1, SIZE).images().sum(), 54.0, "the blank one took its place");
    }
}
