//! Prefill or decode? A step is all one or all the other, since the two are separate compiled graphs.

use crate::config::Config;

/// What a step does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Nothing.
    #[default]
    Idle,
    /// Computes prompt tokens.
    Prefill,
    /// Computes one token of each request that is ready.
    Decode,
}

impl Kind {
    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct PhaseInputs {
    /// A prompt is part done, or the head of the queue may start.
    pub prefill_wanted: bool,
    /// At least one request could decode now.
    pub decode_ready: bool,
    /// The caller asks to hold prefills back while there is something to decode.
    pub throttle_prefills: bool,
}

/// A choice, and what its completion needs to know about the moment it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What the step does.
    pub kind: Kind,
    /// A prefill was wanted and decode steps that were owed came first.
    pub interleaved: bool,
    decode_ready: bool,
    owed: u32,
}

/// Prefill first, with a bound on how long that may starve running requests, and a bound on how long the
/// repayment may starve prompts.
///
/// With `max_consecutive_prefill_steps = p` and `min_decode_steps = d`: at most `p` prefill steps lie
/// between two chances to decode of a ready request, and while a prefill is wanted and not throttled at
/// most `d` decode steps lie between two prefill steps. Decode steps taken while no prompt wanted to
/// start do not count against a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    prefills_max: Option<u32>,
    decodes_min: u32,
    /// Prefill steps since the last decode step, counted while a decode was ready.
    run: u32,
    /// Decode steps still owed.
    owed: u32,
}

impl Phase {
    /// The rule with the bounds of `config`, nothing owed.
    pub fn new(config: &Config) -> Self {
        Self {
            prefills_max: config.max_consecutive_prefill_steps,
            decodes_min: config.min_decode_steps,
            run: 0,
            owed: 0,
        }
    }

    /// Chooses. Pure: what is owed moves in [`Phase::completed`] only, so a step may be planned again.
    pub fn decide(&self, inputs: PhaseInputs) -> Decision {
        let PhaseInputs { prefill_wanted, decode_ready, throttle_prefills } = inputs;
        let contested = prefill_wanted && decode_ready;
        let owed = match self.prefills_max {
            Some(_) if !contested => 0,
            Some(most) if self.owed == 0 && self.run >= most => self.decodes_min,
            _ => self.owed,
        };
        let interleaved = contested && owed > 0;
        let kind = if decode_ready && (interleaved || throttle_prefills || !prefill_wanted) {
            Kind::Decode
        } else if prefill_wanted {
            Kind::Prefill
        } else {
            Kind::Idle
        };
        Decision { kind, interleaved, decode_ready, owed }
    }

    /// The state after a step so decided has run.
    #[must_use]
    pub fn completed(self, decision: Decision) -> Self {
        match decision.kind {
            Kind::Idle => self,
            Kind::Prefill => {
                Self { run: if decision.decode_ready { self.run + 1 } else { 0 }, owed: decision.owed, ..self }
            }
            Kind::Decode => Self { run: 0, owed: decision.owed.saturating_sub(1), ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(p: Option<u32>, d: u32) -> Phase {
        Phase { prefills_max: p, decodes_min: d, run: 0, owed: 0 }
    }

    fn run(phase: &mut Phase, prefill_wanted: bool, decode_ready: bool, throttle_prefills: bool) -> Kind {
        let decision = phase.decide(PhaseInputs { prefill_wanted, decode_ready, throttle_prefills });
        assert_eq!(phase.decide(PhaseInputs { prefill_wanted, decode_ready, throttle_prefills }), decision);
        *phase = phase.completed(decision);
        decision.kind
    }

    #[test]
    fn v11_ordinary_decodes_do_not_count_against_a_newcomer() {
        let mut phase = phase(Some(2), 2);
        for _ in 0..50 {
            assert_eq!(run(&mut phase, false, true, false), Kind::Decode);
        }
        let kinds: Vec<Kind> = (0..5).map(|_| run(&mut phase, true, true, false)).collect();
        assert_eq!(kinds, [Kind::Prefill, Kind::Prefill, Kind::Decode, Kind::Decode, Kind::Prefill]);
    }

    #[test]
    fn v10_without_the_knob_prefill_comes_first_for_ever() {
        let mut phase = phase(None, 1);
        assert!((0..100).all(|_| run(&mut phase, true, true, false) == Kind::Prefill));
    }

    #[test]
    fn prefills_while_nothing_can_decode_are_not_counted() {
        let mut phase = phase(Some(1), 1);
        assert!((0..9).all(|_| run(&mut phase, true, false, false) == Kind::Prefill));
        assert_eq!(run(&mut phase, true, true, false), Kind::Prefill);
        assert_eq!(run(&mut phase, true, true, false), Kind::Decode);
    }

    #[test]
    fn throttling_holds_prefills_back_but_never_idles() {
        let mut phase = phase(Some(1), 3);
        assert_eq!(run(&mut phase, true, false, true), Kind::Prefill);
        assert!((0..9).all(|_| run(&mut phase, true, true, true) == Kind::Decode));
        assert_eq!(run(&mut phase, false, false, true), Kind::Idle);
    }
}
