//! Exact parsing of decimal text such as `0.25` or `1e-3` into a whole number of small units, without a float.

use crate::error::Fault;

/// Maximum number of units: 292 years in nanoseconds.
pub const UNITS_MAX: u64 = i64::MAX as u64;

/// Why a text cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The text is not a finite decimal number.
    Text,
    /// The number is below zero.
    Negative,
    /// The number exceeds [`UNITS_MAX`] units.
    TooLarge,
}

impl Unreadable {
    /// Return the expectation for a [`Fault`].
    pub fn expected(self) -> &'static str {
        match self {
            Self::Text => "a finite decimal number",
            Self::Negative => "a number of at least 0",
            Self::TooLarge => "a number of at most 2^63 - 1 nanoseconds",
        }
    }

    /// Return the fault of `field` with the value `text`.
    pub fn fault(self, field: &'static str, text: &str) -> Fault {
        Fault::new(field, text, self.expected())
    }
}

/// Parse `text` as a number and return it times 10^`places`, rounded half up.
///
/// 9 places convert seconds to nanoseconds, 6 places milliseconds. The syntax is that of Python's `float` (sign,
/// fraction, exponent) without blanks, underscores, infinities and NaN.
pub fn units(text: &str, places: u32) -> Result<u64, Unreadable> {
    let (negative, unsigned) = signed(text.as_bytes());
    let end = unsigned.iter().position(|byte| matches!(byte, b'e' | b'E')).unwrap_or(unsigned.len());
    let (mantissa, exponent) = unsigned.split_at(end);
    let exponent = if exponent.is_empty() { 0 } else { integer(&exponent[1..])? };
    let point = mantissa.iter().position(|&byte| byte == b'.').unwrap_or(mantissa.len());
    let fraction = mantissa.get(point + 1..).unwrap_or_default();
    let digits = || mantissa[..point].iter().chain(fraction);
    if digits().next().is_none() || !digits().all(u8::is_ascii_digit) {
        return Err(Unreadable::Text);
    }
    if digits().all(|&digit| digit == b'0') {
        return Ok(0);
    }
    if negative {
        return Err(Unreadable::Negative);
    }
    // `kept` digits are left of the shifted decimal point; the next digit decides the rounding.
    let kept = exponent.saturating_add(length(mantissa[..point].len())).saturating_add(i64::from(places));
    if kept < 0 {
        return Ok(0);
    }
    let mut value: u64 = 0;
    let mut at: i64 = 0;
    for &digit in digits() {
        if at == kept {
            value += u64::from(digit >= b'5');
            break;
        }
        value = times_ten(value, digit - b'0')?;
        at += 1;
    }
    while at < kept {
        value = times_ten(value, 0)?;
        at += 1;
    }
    if value > UNITS_MAX { Err(Unreadable::TooLarge) } else { Ok(value) }
}

fn times_ten(value: u64, digit: u8) -> Result<u64, Unreadable> {
    // `UNITS_MAX` is below `u64::MAX`, so that rounding up cannot overflow.
    let next = value.checked_mul(10).and_then(|tens| tens.checked_add(u64::from(digit)));
    next.filter(|&next| next <= UNITS_MAX).ok_or(Unreadable::TooLarge)
}

/// Parse a signed whole number; a number out of range saturates.
fn integer(text: &[u8]) -> Result<i64, Unreadable> {
    let (negative, digits) = signed(text);
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(Unreadable::Text);
    }
    let add = |value: i64, &digit: &u8| value.saturating_mul(10).saturating_add(i64::from(digit - b'0'));
    let value: i64 = digits.iter().fold(0, add);
    Ok(if negative { -value } else { value })
}

/// Split off the sign: return whether it is a minus, and the rest.
fn signed(text: &[u8]) -> (bool, &[u8]) {
    let rest = text.strip_prefix(b"-").or_else(|| text.strip_prefix(b"+")).unwrap_or(text);
    (text.starts_with(b"-"), rest)
}

fn length(digits: usize) -> i64 {
    i64::try_from(digits).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_exact_nanoseconds() {
        let cases = [
            ("0", 0),
            ("1", 1_000_000_000),
            ("+1.5", 1_500_000_000),
            (".5", 500_000_000),
            ("2.", 2_000_000_000),
            ("1e-3", 1_000_000),
            ("1.25E+1", 12_500_000_000),
            ("0.1", 100_000_000),
            // No float lies between the next two values.
            ("1700158546.680590001", 1_700_158_546_680_590_001),
            ("1700158546.680590002", 1_700_158_546_680_590_002),
            ("000123e-3", 123_000_000),
            ("-0.00", 0),
            ("0e999999999999999999999", 0),
            ("9223372036.854775807", UNITS_MAX),
        ];
        for (text, nanoseconds) in cases {
            assert_eq!(units(text, 9), Ok(nanoseconds), "{text}");
        }
    }

    #[test]
    fn the_digit_after_the_last_kept_digit_rounds_half_up() {
        let cases = [
            ("0.0000000005", 1),
            ("0.00000000049999", 0),
            ("0.0000000015", 2),
            ("5e-10", 1),
            ("5e-11", 0),
            ("49e-11", 0),
            ("50e-11", 1),
            ("1e-99999999999999999999", 0),
            ("0.9999999999", 1_000_000_000),
        ];
        for (text, nanoseconds) in cases {
            assert_eq!(units(text, 9), Ok(nanoseconds), "{text}");
        }
        assert_eq!(units("24.59", 6), Ok(24_590_000));
        assert_eq!(units("0.0000005", 6), Ok(1));
    }

    #[test]
    fn m09_text_that_is_not_a_time_is_refused() {
        for text in ["", "+", ".", "e5", "1e", "1e+", "1e1.5", "1.2.3", "nan", "NaN", "inf", "-inf", "Infinity"] {
            assert_eq!(units(text, 9), Err(Unreadable::Text), "{text}");
        }
        for text in ["abc", "1_000", " 1", "1 ", "0x10", "1,5", "--1", "+-1", "\u{0661}", "1\0"] {
            assert_eq!(units(text, 9), Err(Unreadable::Text), "{text}");
        }
        for text in ["-1", "-0.5", "-1e-30"] {
            assert_eq!(units(text, 9), Err(Unreadable::Negative), "{text}");
        }
        let long = "9".repeat(400);
        for text in ["9223372036.854775808", "9223372036.8547758075", "1e30", "1e99999999999999999999", &long] {
            assert_eq!(units(text, 9), Err(Unreadable::TooLarge), "{text}");
        }
    }
}
