//! Batches for the thread that owns a session. Where the session computes on a GPU, a thread of its own collects and
//! stacks the next batch meanwhile; on the host nothing would be gained, because sessions there work side by side.

use std::sync::atomic::Ordering;
use std::thread::Builder;

use crossbeam_channel::bounded;

use super::batch::{Batches, Patience};
use super::guarded;
use super::progress::{Progress, Wait};
use super::stack::{Image, Stack};
use super::stop::Stop;
use crate::error::Error;
use crate::geometry::Size;
use crate::model::memory::HostMemory;

/// Tensors of a session that computes elsewhere: one is read by it while the other is filled. Whoever fills waits when
/// both are full.
pub const STACKS_ON_GPU: usize = 2;

/// Gives `work` one batch of `batches` after the other until there are none, each with the memory for its tensors.
/// `images` says how many a batch of that key may have, `size` what size its tensors have.
///
/// # Errors
/// The first of `work`; then the other thread has left, too.
pub fn each_batch<T, K>(
    (progress, stop, memory): (&Progress, &Stop, &HostMemory),
    batches: &Batches<'_, T, K>,
    images: impl Fn(&K) -> usize + Send,
    size: impl Fn(&T) -> Size + Send,
    mut work: impl FnMut(Vec<T>, &mut Stack) -> Result<(), Error>,
) -> Result<(), Error>
where
    T: Image + Send,
    K: PartialEq + Send,
{
    let (step, Patience::WhileBusy(in_hand)) = (batches.step(), batches.patience()) else {
        let mut stack = Stack::new(memory);
        while let Some(batch) = batches.next(&images) {
            stack.forget();
            work(batch, &mut stack)?;
        }
        return Ok(());
    };
    let (full_tx, full_rx) = bounded::<(Vec<T>, Stack)>(0);
    let (empty_tx, empty_rx) = bounded(STACKS_ON_GPU);
    for _ in 0..STACKS_ON_GPU {
        // There is room for all of them.
        let _ = empty_tx.send(Stack::new(memory));
    }
    std::thread::scope(|scope| {
        let filling = Builder::new().name(format!("{}-fill", step.word())).spawn_scoped(scope, move || {
            while let Some(batch) = batches.next(&images) {
                // Closed channels mean that the session has left.
                let Ok(mut stack) = empty_rx.recv() else { return };
                stack.forget();
                stack.of(&batch, 0..batch.len(), size(&batch[0]));
                in_hand.fetch_add(1, Ordering::SeqCst);
                if full_tx.send((batch, stack)).is_err() {
                    return;
                }
            }
        });
        let filling = filling.map_err(|e| Error::System(format!("cannot start the thread that fills tensors: {e}")))?;
        // Who fills may be waiting for images: on an error everybody has to leave before it can be joined.
        let worked = guarded(stop, || {
            while let Ok((batch, mut stack)) = progress.waits(step, Wait::Input, || full_rx.recv()) {
                work(batch, &mut stack)?;
                let _ = empty_tx.send(stack);
                in_hand.fetch_sub(1, Ordering::SeqCst);
            }
            Ok(())
        });
        drop(full_rx);
        filling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        worked
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};

    use crossbeam_channel::{Receiver, unbounded};

    use super::*;
    use crate::pipeline::batch::Flow;
    use crate::pipeline::budget::Budget;
    use crate::row::Stage;

    const SIZE: Size = Size::new(1, 1);
    const PATIENCE: Duration = Duration::from_secs(10);

    type Work<'a> = dyn FnMut(Vec<Vec<f32>>, &mut Stack) -> Result<(), Error> + 'a;

    /// Batches of up to `images` from `rx`; `filled` counts the tensors that another thread has filled.
    fn run(
        (rx, images): (&Receiver<Vec<f32>>, usize),
        stop: &Stop,
        filled: &AtomicUsize,
        work: &mut Work<'_>,
    ) -> Result<(), Error> {
        let (progress, budget, in_hand) = (Progress::default(), Budget::new(9, 9), AtomicUsize::new(0));
        let patience = Patience::WhileBusy(&in_hand);
        let flow = Flow { rx, progress: &progress, budget: &budget, stage: Stage::Embed, sessions: 1, patience };
        let batches = Batches::new(flow, |_: &Vec<f32>| (), |_| ());
        let size = |_: &Vec<f32>| {
            filled.fetch_add(1, Ordering::SeqCst);
            SIZE
        };
        each_batch((&progress, stop, &HostMemory::default()), &batches, |()| images, size, work)
    }

    #[test]
    fn the_next_tensor_is_filled_while_the_session_works_and_not_the_one_after() {
        let (tx, rx) = unbounded();
        (0..5_u8).for_each(|n| tx.send(vec![f32::from(n); 3]).unwrap());
        drop(tx);
        let (filled, mut seen) = (AtomicUsize::new(0), Vec::new());
        run((&rx, 1), &Stop::default(), &filled, &mut |batch, stack| {
            let due = (seen.len() + 2).min(5);
            let began = Instant::now();
            while filled.load(Ordering::SeqCst) < due {
                assert!(began.elapsed() < PATIENCE, "the next one is not filled");
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(filled.load(Ordering::SeqCst), due);
            seen.push(stack.of(&batch, 0..1, SIZE).images()[[0, 0, 0, 0]]);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [0.0, 1.0, 2.0, 3.0, 4.0], "each batch has its own tensor");
    }

    #[test]
    fn a_partial_batch_grows_while_the_session_works_and_goes_when_it_is_through() {
        let (tx, rx) = unbounded();
        tx.send(vec![0.0; 3]).unwrap();
        let (mut tx, mut seen) = (Some(tx), Vec::new());
        run((&rx, 3), &Stop::default(), &AtomicUsize::new(0), &mut |batch, _| {
            seen.push(batch.len());
            for image in tx.take().into_iter().flat_map(|tx| std::iter::repeat_n(tx, 2)) {
                // Long enough for a thread that does not wait to take the first alone.
                image.send(vec![0.0; 3]).unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [1, 2]);
    }

    #[test]
    fn an_error_makes_who_fills_leave_though_more_images_may_come() {
        let (tx, rx) = unbounded();
        tx.send(vec![0.0; 3]).unwrap();
        let stop = Stop::default();
        std::thread::scope(|scope| {
            // Whoever sends images leaves only when the run is ending.
            scope.spawn(|| {
                while !stop.is_ending() {
                    std::thread::yield_now();
                }
                drop(tx);
            });
            let result = run((&rx, 1), &stop, &AtomicUsize::new(0), &mut |_, _| Err(Error::Model("broken".to_owned())));
            assert!(matches!(result, Err(Error::Model(_))));
        });
    }
}
