//! Decoding, case by case and against an oracle that was written without looking at the decoder.

use proptest::prelude::*;

use super::oracle::{self, Verdict};
use super::{Invalid, NewPlant, Plant};

fn decode(json: &str) -> Result<NewPlant, Invalid> {
    NewPlant::from_json(json.as_bytes())
}

fn id_of(number: &str) -> Result<i64, String> {
    match decode(&format!(r#"{{"id":{number},"name":""}}"#)) {
        Ok(plant) => Ok(plant.id),
        Err(invalid) => Err(invalid.to_string()),
    }
}

fn problem(json: &str) -> String {
    match decode(json) {
        Err(Invalid::NotAPlant(_)) => decode(json).expect_err("just seen").to_string(),
        other => panic!("{json}: {other:?}"),
    }
}

fn syntax_error(body: impl AsRef<[u8]>) -> String {
    let body = body.as_ref();
    match NewPlant::from_json(body) {
        Err(Invalid::NotJson(reason)) => reason,
        other => panic!("{}: {other:?}", body.escape_ascii()),
    }
}

#[test]
fn integers_are_exact_over_the_whole_range_however_they_are_written() {
    for (written, id) in [
        ("0", 0),
        ("-0", 0),
        ("-0.0e7", 0),
        ("0e99999999999999999999", 0),
        ("1.0", 1),
        ("1e3", 1000),
        ("1E+3", 1000),
        ("1000e-3", 1),
        ("12.5e1", 125),
        ("9007199254740993", 9_007_199_254_740_993),
        ("9007199254740993.0", 9_007_199_254_740_993),
        ("9223372036854775807", i64::MAX),
        ("9223372036854775807.0", i64::MAX),
        ("922337203685477580700e-2", i64::MAX),
        ("9.223372036854775807e18", i64::MAX),
        ("-9223372036854775808", i64::MIN),
        ("-9223372036854775808.000", i64::MIN),
        ("-9.223372036854775808E18", i64::MIN),
    ] {
        assert_eq!(id_of(written), Ok(id), "{written}");
    }
    let many_zeros = format!("0.{}1e1001", "0".repeat(1000));
    assert_eq!(id_of(&many_zeros), Ok(1));
}

#[test]
fn numbers_that_are_no_int64_are_refused_with_the_reason() {
    for written in [
        "0.5",
        "1.0000000000000000000001",
        "1e-1",
        "-1e-99999999999999999999",
    ] {
        let reason = "id: expected an integer, found a number with a fraction";
        assert_eq!(id_of(written), Err(reason.to_owned()), "{written}");
    }
    for written in [
        "9223372036854775808",
        "9223372036854775807.5e1",
        "-9223372036854775809",
        "1e19",
        "1e400",
        "1e99999999999999999999",
        "99999999999999999999999999999999999999999999999999",
    ] {
        let reason = "id: outside the range of int64";
        assert_eq!(id_of(written), Err(reason.to_owned()), "{written}");
    }
}

#[test]
fn every_problem_of_a_plant_is_named_at_once() {
    assert_eq!(problem("{}"), "id: missing; name: missing");
    assert_eq!(
        problem(r#"{"name":1,"tag":null}"#),
        "id: missing; name: expected a string, found a number; tag: expected a string, found null"
    );
    assert_eq!(
        problem(r#"{"id":true,"id":1,"name":[],"name":"x","tag":{},"tag":""}"#),
        "id: given more than once; id: expected an integer, found a boolean; \
         name: given more than once; name: expected a string, found an array; \
         tag: given more than once; tag: expected a string, found an object"
    );
    assert_eq!(
        problem(r#"{"id":"1","name":"\ud800","tag":"\udc00\ud800"}"#),
        "id: expected an integer, found a string; \
         name: contains an unpaired surrogate; \
         tag: contains an unpaired surrogate"
    );
}

#[test]
fn another_json_value_is_not_a_plant() {
    for (json, found) in [
        (r#"[1,"x"]"#, "an array"),
        (r#" "\ud800" "#, "a string"),
        ("1e999", "a number"),
        ("-1", "a number"),
        ("true", "a boolean"),
        ("false", "a boolean"),
        ("null", "null"),
    ] {
        assert_eq!(problem(json), format!("expected an object, found {found}"));
    }
}

#[test]
fn what_is_not_json_is_told_with_line_and_column() {
    for (json, place) in [
        ("", "it is empty"),
        (" \r\n", "it is empty"),
        ("{", "line 1 column 1"),
        ("{\"id\":1,\n\"name\":\"x\"", "line 2 column 10"),
        ("{\"id\":1,\n \"name\":\"x\",}", "line 2 column 13"),
        (r#"{"id":01,"name":"x"}"#, "line 1 column 8"),
        (r#"{"id":1.,"name":"x"}"#, "line 1 column 9"),
        (r#"{"id":+1,"name":"x"}"#, "line 1 column 7"),
        (r#"{"id":NaN,"name":"x"}"#, "line 1 column 7"),
        (r#"{"id":1,"name":"x"} x"#, "line 1 column 21"),
        (r#"{"id":1,"name":"x"}{}"#, "line 1 column 20"),
        (r#"{"id":1,"name":'x'}"#, "line 1 column 16"),
        (r#"{"id":1,"name":"\x"}"#, "line 1 column 18"),
        ("{\"id\":1,\"name\":\"\n\"}", "line 1 column 16"),
        ("\u{feff}{\"id\":1,\"name\":\"x\"}", "line 1 column 1"),
        (r#"{"id":1,"name":"x","other":[1,]}"#, "line 1 column 31"),
    ] {
        let reason = syntax_error(json);
        assert!(reason.ends_with(place), "{json:?}: {reason}, not {place}");
    }
    let reason = syntax_error(b"{\"id\":1,\n\"name\":\"\xff\"}");
    assert_eq!(reason, "invalid UTF-8 at line 2 column 9");
    // In a member that is skipped, too.
    let reason = syntax_error(b"{\"id\":1,\"name\":\"\",\"other\":\"\xc0\xaf\"}");
    assert_eq!(reason, "invalid UTF-8 at line 1 column 28");
}

#[test]
fn broken_json_is_not_json_whatever_else_is_wrong() {
    for json in [
        r#"{"id":"x","name":1"#,
        r#"{"id":1,"id":2,}"#,
        r#"[1,"x""#,
        r#"{"tag":null"#,
    ] {
        syntax_error(json);
    }
}

#[test]
fn unknown_members_are_ignored_to_any_depth() {
    let depth = 300_000;
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        let deep = format!("{}1{}", open.repeat(depth), close.repeat(depth));
        let plant = decode(&format!(
            r#"{{"id":1,"x":{deep},"name":"n","":0,"\ud800":"\ud800"}}"#
        ));
        assert_eq!(plant.expect("a plant").plant.name, "n");
        let problem = problem(&format!(r#"{{"id":1,"name":{deep}}}"#));
        assert!(problem.starts_with("name: expected a string, found a"));
    }
}

#[test]
fn a_member_is_known_by_what_its_name_means() {
    let plant = decode(r#"{"\u0069d":7,"na\u006De":"n","\u0074\u0061\u0067":"t"}"#);
    let tag = Some("t".to_owned());
    let name = "n".to_owned();
    assert_eq!(
        plant,
        Ok(NewPlant {
            id: 7,
            plant: Plant { name, tag }
        })
    );
    assert_eq!(
        problem(r#"{"id":1,"\u0069d":1,"name":""}"#),
        "id: given more than once"
    );
    assert_eq!(problem(r#"{"ID":1,"name":""}"#), "id: missing");
}

#[test]
fn any_json_string_is_kept_exactly() {
    for (written, meant) in [
        (r"", ""),
        (r"\u0000", "\0"),
        (r"a\u0000b", "a\0b"),
        (r"\ud83c\udf31", "🌱"),
        ("🌱", "🌱"),
        (r#"\"\\\/\b\f\n\r\t"#, "\"\\/\u{8}\u{c}\n\r\t"),
        ("e\u{301}", "e\u{301}"),
        ("\u{202e}abc\u{200f}", "\u{202e}abc\u{200f}"),
        ("\u{7f}\u{ffff}\u{10ffff}", "\u{7f}\u{ffff}\u{10ffff}"),
    ] {
        let plant = decode(&format!(
            r#"{{"id":1,"name":"{written}","tag":"{written}"}}"#
        ));
        let plant = plant.expect("a plant").plant;
        assert_eq!(
            (plant.name.as_str(), plant.tag.as_deref()),
            (meant, Some(meant))
        );
    }
}

fn number() -> impl Strategy<Value = String> {
    let near_a_bound = (-3_i128..=3, any::<bool>()).prop_map(|(step, low)| {
        let bound = if low { i64::MIN } else { i64::MAX };
        (i128::from(bound) + step).to_string()
    });
    let whole = prop_oneof![near_a_bound, "-?[0-9]{1,4}", "-?(0|[1-9][0-9]{0,40})"];
    (
        whole,
        "(\\.[0-9]{0,4}|\\.0{0,30})?",
        "([eE][+-]?[0-9]{0,3})?",
        0_usize..25,
    )
        .prop_map(|(whole, fraction, exponent, shift)| {
            // Half of the time the point is moved to the left and the exponent makes up for it.
            if shift < 12 && fraction.is_empty() && exponent.is_empty() {
                let (sign, digits) = whole.split_at(usize::from(whole.starts_with('-')));
                let digits = format!("{digits:0>30}");
                let (left, right) = digits.split_at(digits.len() - shift);
                let left = left.trim_start_matches('0');
                let left = if left.is_empty() { "0" } else { left };
                let right = if right.is_empty() { "0" } else { right };
                format!("{sign}{left}.{right}e{shift}")
            } else {
                format!("{whole}{fraction}{exponent}")
            }
        })
}

fn string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[ -~&&[^\"\\\\]]{0,6}",
        2 => any::<char>().prop_filter("would end the string", |c| !"\"\\".contains(*c))
            .prop_map(String::from),
        2 => "\\\\u[0-9a-fA-F]{4}",
        1 => "\\\\u[dD][89abAB][0-9a-f]{2}",
        1 => "\\\\u[dD][89abAB][0-9a-f]{2}\\\\u[dD][c-fC-F][0-9a-f]{2}",
        1 => "\\\\[\"\\\\/bfnrtxu]",
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        4 => number(),
        4 => string(),
        1 => prop::sample::select(vec!["true", "false", "null", "nul", "NaN"]).prop_map(String::from),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3)
                .prop_map(|all| format!("[{}]", all.join(","))),
            prop::collection::vec((string(), inner), 0..3).prop_map(object),
        ]
    })
}

fn object(members: Vec<(String, String)>) -> String {
    let members = members
        .into_iter()
        .map(|(name, value)| format!("{name}:{value}"));
    format!("{{{}}}", members.collect::<Vec<_>>().join(","))
}

fn body() -> impl Strategy<Value = String> {
    let space = "[ \n\r\t]{0,2}";
    let id = prop_oneof![9 => number(), 1 => value()];
    let id = ("\"(id|i\\\\u0064)\"", id);
    let name = (
        "\"(name|nam\\\\u0065)\"",
        prop_oneof![9 => string(), 1 => value()],
    );
    let tag = ("\"tag\"", prop_oneof![9 => string(), 1 => value()]);
    let member =
        prop_oneof![2 => id.clone(), 1 => name.clone(), 1 => tag.clone(), 2 => (string(), value())];
    let plant = (
        id,
        name,
        prop::option::of(tag),
        prop::collection::vec(member, 0..2),
    )
        .prop_map(|(id, name, tag, more)| {
            [vec![id, name], tag.into_iter().collect(), more].concat()
        })
        .prop_shuffle();
    prop_oneof![
        9 => (space, plant.prop_map(object), space).prop_map(|(a, json, b)| format!("{a}{json}{b}")),
        1 => value(),
    ]
}

fn agrees(body: &[u8]) -> Result<(), TestCaseError> {
    let decoded = match NewPlant::from_json(body) {
        Ok(NewPlant {
            id,
            plant: Plant { name, tag },
        }) => Verdict::Plant(id, name, tag),
        Err(Invalid::NotJson(_)) => Verdict::NotJson,
        Err(Invalid::NotAPlant(_)) => Verdict::NotAPlant,
    };
    prop_assert_eq!(decoded, oracle::judge(body), "{}", body.escape_ascii());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_decoder_agrees_with_the_oracle(body in body()) {
        agrees(body.as_bytes())?;
    }

    #[test]
    fn the_decoder_agrees_with_the_oracle_on_broken_bodies(
        body in body(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in 0_usize..3,
    ) {
        let mut body = body.into_bytes();
        let at = at.index(body.len().max(1));
        let end = (at + cut).min(body.len());
        let inserted = if byte < 200 { vec![byte] } else { vec![] };
        body.splice(at.min(end)..end, inserted);
        agrees(&body)?;
    }

    #[test]
    fn every_int64_comes_back_as_it_was_sent(id in any::<i64>()) {
        for written in [format!("{id}"), format!("{id}.0"), format!("{id}e0"), format!("{id}0e-1")] {
            prop_assert_eq!(id_of(&written), Ok(id));
        }
    }
}

#[test]
fn the_generated_bodies_are_of_every_kind() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut counts = [0; 3];
    for _ in 0..1000 {
        let body = body().new_tree(&mut runner).expect("a body").current();
        counts[match oracle::judge(body.as_bytes()) {
            Verdict::NotJson => 0,
            Verdict::NotAPlant => 1,
            Verdict::Plant(..) => 2,
        }] += 1;
    }
    assert!(counts.iter().all(|&count| count > 50), "{counts:?}");
}
