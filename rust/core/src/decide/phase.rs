//! The choice between prefill and decode. A step is all of one kind, because the two are separate compiled graphs.

use crate::config::Config;

/// Kind of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// No request runs.
    #[default]
    Idle,
    /// The step computes prompt tokens.
    Prefill,
    /// The step computes one token of each request that can decode.
    Decode,
}

impl Kind {
    /// Stable name, for metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Inputs of [`Phase::decide`].
#[derive(Clone, Copy, Debug)]
pub struct PhaseInputs {
    /// Whether a running request is prefilling or the head of the queue fits.
    pub prefill_wanted: bool,
    /// Whether a request can decode now.
    pub decode_ready: bool,
    /// Whether the caller asks for no prefill while a request can decode.
    pub throttle_prefills: bool,
}

/// A decision of [`Phase::decide`], with the inputs that [`Phase::completed`] needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Kind of the step.
    pub kind: Kind,
    /// Whether a prefill was wanted and decode steps due under the interleave bound come first.
    pub interleaved: bool,
    decode_ready: bool,
    decodes_due: u32,
}

/// The interleave bound: prefill comes first, up to a streak after which decode steps are due.
///
/// With `max_consecutive_prefill_steps = p` and `min_decode_steps = d`, at most `p` prefill steps lie between two
/// decode opportunities of a running request. While a prefill is wanted and not throttled, at most `d` decode steps lie
/// between two prefill steps. Decode steps that run while no prefill is wanted do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    prefills_max: Option<u32>,
    decodes_min: u32,
    /// Prefill steps since the last decode step or since the last step in which no request could decode.
    prefill_streak: u32,
    /// Decode steps due before the next prefill step.
    decodes_due: u32,
}

impl Phase {
    /// Return the rule with the bounds of `config` and no decode step due.
    pub fn new(config: &Config) -> Self {
        Self {
            prefills_max: config.max_consecutive_prefill_steps,
            decodes_min: config.min_decode_steps,
            prefill_streak: 0,
            decodes_due: 0,
        }
    }

    /// Decide the kind of the next step. The state changes in [`Phase::completed`] only, so a step can be planned
    /// again.
    pub fn decide(&self, inputs: PhaseInputs) -> Decision {
        let PhaseInputs { prefill_wanted, decode_ready, throttle_prefills } = inputs;
        let contested = prefill_wanted && decode_ready;
        let decodes_due = match self.prefills_max {
            Some(_) if !contested => 0,
            Some(most) if self.decodes_due == 0 && self.prefill_streak >= most => self.decodes_min,
            _ => self.decodes_due,
        };
        let interleaved = contested && decodes_due > 0;
        let kind = if decode_ready && (interleaved || throttle_prefills || !prefill_wanted) {
            Kind::Decode
        } else if prefill_wanted {
            Kind::Prefill
        } else {
            Kind::Idle
        };
        Decision { kind, interleaved, decode_ready, decodes_due }
    }

    /// Return the state after a step with `decision` has run.
    #[must_use]
    pub fn completed(self, decision: Decision) -> Self {
        match decision.kind {
            Kind::Idle => self,
            Kind::Prefill => {
                let prefill_streak = if decision.decode_ready { self.prefill_streak + 1 } else { 0 };
                Self { prefill_streak, decodes_due: decision.decodes_due, ..self }
            }
            Kind::Decode => Self { prefill_streak: 0, decodes_due: decision.decodes_due.saturating_sub(1), ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phase(p: Option<u32>, d: u32) -> Phase {
        Phase { prefills_max: p, decodes_min: d, prefill_streak: 0, decodes_due: 0 }
    }

    fn run(phase: &mut Phase, prefill_wanted: bool, decode_ready: bool, throttle_prefills: bool) -> Kind {
        let decision = phase.decide(PhaseInputs { prefill_wanted, decode_ready, throttle_prefills });
        assert_eq!(phase.decide(PhaseInputs { prefill_wanted, decode_ready, throttle_prefills }), decision);
        *phase = phase.completed(decision);
        decision.kind
    }

    #[test]
    fn v11_decode_steps_without_a_waiting_prompt_do_not_count() {
        let mut phase = phase(Some(2), 2);
        for _ in 0..50 {
            assert_eq!(run(&mut phase, false, true, false), Kind::Decode);
        }
        let kinds: Vec<Kind> = (0..5).map(|_| run(&mut phase, true, true, false)).collect();
        assert_eq!(kinds, [Kind::Prefill, Kind::Prefill, Kind::Decode, Kind::Decode, Kind::Prefill]);
    }

    #[test]
    fn v10_without_max_consecutive_prefill_steps_prefill_always_comes_first() {
        let mut phase = phase(None, 1);
        assert!((0..100).all(|_| run(&mut phase, true, true, false) == Kind::Prefill));
    }

    #[test]
    fn prefill_steps_while_no_request_can_decode_do_not_count() {
        let mut phase = phase(Some(1), 1);
        assert!((0..9).all(|_| run(&mut phase, true, false, false) == Kind::Prefill));
        assert_eq!(run(&mut phase, true, true, false), Kind::Prefill);
        assert_eq!(run(&mut phase, true, true, false), Kind::Decode);
    }

    #[test]
    fn throttling_delays_prefills_only_while_a_request_can_decode() {
        let mut phase = phase(Some(1), 3);
        assert_eq!(run(&mut phase, true, false, true), Kind::Prefill);
        assert!((0..9).all(|_| run(&mut phase, true, true, true) == Kind::Decode));
        assert_eq!(run(&mut phase, false, false, true), Kind::Idle);
    }
}
