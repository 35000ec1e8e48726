//! Completion: `complete` is the only call that changes the counts of a request.

use super::scheduler::{MixedScheduler, running_position};
use super::step::{Emitted, Planned};
use crate::error::Error;

impl MixedScheduler {
    /// Complete the plan of the last `schedule`, and return the requests that emitted a token, in batch order.
    ///
    /// Requests that were cancelled since are left out. Returns [`Error::NotDue`] if the plan was completed already.
    pub fn complete(&mut self) -> Result<&[Emitted], Error> {
        if !self.due {
            return Err(Error::NotDue("plan: no plan is due: expected schedule() before complete()"));
        }
        self.due = false;
        match &mut self.decode_run {
            Some(run) if run.remaining > 1 => {
                run.completed += 1;
                run.remaining -= 1;
            }
            _ => self.apply(),
        }
        debug_assert_eq!(self.check(), Ok(()));
        Ok(&self.emitted)
    }

    /// Complete the plan and the `times - 1` identical steps after it, and return the emissions of the last one.
    ///
    /// The result equals that of planning and completing each step. Returns [`Error::Invalid`] if `times` is above
    /// [`MixedScheduler::decode_horizon`].
    pub fn complete_decodes(&mut self, times: u64) -> Result<&[Emitted], Error> {
        let horizon = self.decode_horizon();
        if !(1..=horizon).contains(&times) {
            let expected = format!("a whole number from 1 to {horizon}, the decode horizon");
            return Err(Error::invalid("times", times, expected));
        }
        if let Some(run) = &mut self.decode_run
            && self.due
        {
            run.completed += times - 1;
            run.remaining -= times - 1;
        }
        self.complete()
    }

    /// Add the planned tokens to the counts, and remove the requests that finish.
    fn apply(&mut self) {
        self.end_decode_run();
        self.emitted.clear();
        let mut any_finished = false;
        // The plan is mostly in the order of `running`, so the next request is tried before a search.
        let mut next = 0;
        for &Planned { row, tokens } in &self.plan {
            let position = match self.running.get(next) {
                Some(running) if running.row == row => Some(next),
                _ => self.requests.get(row).and_then(|request| running_position(&self.running, request.ticket)),
            };
            let Some(position) = position else { continue };
            next = position + 1;
            let running = &mut self.running[position];
            if running.prompt_left > tokens {
                running.prompt_left -= tokens;
                continue;
            }
            running.prompt_left = 0;
            running.outputs_left -= 1;
            let finished = running.outputs_left == 0;
            if finished {
                any_finished = true;
                let request = self.requests.remove(row).expect("a running request is alive");
                self.reserved -= request.added.reservation();
            }
            self.emitted.push(Emitted { row, finished });
        }
        if any_finished {
            self.running.retain(|running| running.outputs_left > 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{NewMixed, Progress};
    use super::super::step::Wait;
    use super::*;
    use crate::request::Row;

    fn new(prompt_len: u64, max_new: u64) -> NewMixed {
        NewMixed { prompt_len, max_new, prefilled: 0, generated: 0 }
    }

    /// Return everything that a caller can see after a step.
    fn visible(s: &MixedScheduler) -> (Vec<Row>, Vec<Option<Progress>>, u64, Option<Wait>) {
        let running: Vec<Row> = s.running().collect();
        let progress = running.iter().map(|&row| s.progress(row)).collect();
        (running, progress, s.reserved(), s.head_wait())
    }

    #[test]
    fn completing_several_decode_steps_at_once_equals_single_steps() {
        let mut jumping = MixedScheduler::new(8, 3, 60).unwrap();
        for (prompt, outputs) in [(3, 7), (2, 4), (9, 12), (4, 2), (1, 1)] {
            jumping.add(new(prompt, outputs)).unwrap();
        }
        let mut stepping = jumping.clone();
        let mut jumps = Vec::new();
        while !jumping.schedule().is_empty() {
            let times = jumping.decode_horizon();
            jumps.push(times);
            let jumped = jumping.complete_decodes(times).unwrap().to_vec();
            let mut stepped = Vec::new();
            for _ in 0..times {
                stepping.schedule();
                stepped = stepping.complete().unwrap().to_vec();
            }
            assert_eq!(jumped, stepped);
            assert_eq!(visible(&jumping), visible(&stepping));
        }
        assert_eq!(jumps, [1, 1, 2, 1, 1, 1, 6]);
        assert_eq!((jumping.reserved(), stepping.schedule()), (0, [].as_slice()));
    }

    #[test]
    fn completing_more_steps_than_the_horizon_is_refused() {
        let mut s = MixedScheduler::new(8, 2, 60).unwrap();
        assert!(matches!(s.complete_decodes(1), Err(Error::NotDue(_))));
        s.add(new(1, 5)).unwrap();
        s.schedule();
        assert_eq!(s.decode_horizon(), 1, "the step prefills a prompt");
        s.complete().unwrap();
        s.schedule();
        assert_eq!(s.decode_horizon(), 4);
        for times in [0, 5] {
            assert!(matches!(s.complete_decodes(times), Err(Error::Invalid(_))));
        }
        s.add(new(1, 1)).unwrap();
        assert_eq!(s.decode_horizon(), 1, "the next step admits a request");
        assert_eq!(s.complete_decodes(1).unwrap().len(), 1);
        assert_eq!(s.schedule().len(), 2);
    }
}
