//! The description of one configuration field.

/// A configuration field, for everything that lists fields: command-line options, documentation, tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name in every interface.
    pub name: &'static str,
    /// Values that the field takes.
    pub kind: FieldKind,
    /// Names of the values of a [`FieldKind::Choice`]; empty for other kinds.
    pub choices: &'static [&'static str],
    /// Value of a field that is not given.
    pub default: FieldDefault,
    /// Meaning, in one sentence.
    pub meaning: &'static str,
    /// Where the value comes from under vLLM.
    pub source: Source,
}

/// Values that a field takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    /// A whole number from the given one to [`crate::request::TOKENS_MAX`].
    Count(u32),
    /// A strictly ascending list of compiled sizes.
    Sizes,
    /// One of a few names.
    Choice,
    /// True or false.
    Flag,
    /// Cost by padded tokens.
    Costs,
}

/// Value of a field that is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldDefault {
    /// The field must be given.
    Required,
    /// A number.
    Number(u32),
    /// The choice of that name.
    Name(&'static str),
    /// False.
    Off,
    /// No value; the text describes the effect.
    Unset(&'static str),
    /// A value computed from other fields; the text says how.
    Derived(&'static str),
}

/// Where the value of a field comes from under vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The entry of that name in `additional_config["neuron_config"]`.
    NeuronConfig,
    /// A flag of vLLM's own.
    VllmFlag(&'static str),
}
