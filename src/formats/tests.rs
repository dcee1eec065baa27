//! What is written is read back exactly; files of other programs are read as they mean it, or rejected with line numbers.

use proptest::prelude::*;

use super::{COMMENT, Entry, Format, Reader, spreadsheet_safe};
use crate::plant::{NewPlant, Plant};

fn entries(format: Format, text: &[u8]) -> Vec<Entry> {
    let mut reader = Reader::new(text, format, 1000, false);
    let mut entries = Vec::new();
    while let Some(entry) = reader.next_entry().expect("readable") {
        entries.push(entry);
    }
    assert_eq!(reader.bytes_read, text.len() as u64);
    entries
}

fn csv(text: impl AsRef<[u8]>) -> Vec<Entry> {
    entries(Format::Csv, text.as_ref())
}

fn ndjson(text: impl AsRef<[u8]>) -> Vec<Entry> {
    entries(Format::Ndjson, text.as_ref())
}

fn plant(id: i64, name: &str, tag: Option<&str>) -> NewPlant {
    let (name, tag) = (name.to_owned(), tag.map(str::to_owned));
    let plant = Plant { name, tag };
    NewPlant { id, plant }
}

/// The problems with their line numbers.
fn problems(entries: Vec<Entry>) -> Vec<(u64, String)> {
    let problem = |entry: Entry| Some((entry.text.lines.first, entry.plant.err()?.problem));
    entries.into_iter().filter_map(problem).collect()
}

fn plants(entries: Vec<Entry>) -> Vec<NewPlant> {
    let plant = |entry: Entry| {
        entry
            .plant
            .unwrap_or_else(|rejection| panic!("{}: {rejection:?}", entry.text.lines))
    };
    entries.into_iter().map(plant).collect()
}

#[test]
fn the_name_of_a_file_implies_the_format() {
    for (name, format) in [
        ("a.csv", Format::Csv),
        ("a.b.CSV", Format::Csv),
        ("a.tsv", Format::Csv),
        ("a.ndjson", Format::Ndjson),
        ("csv", Format::Ndjson),
        ("-", Format::Ndjson),
    ] {
        assert_eq!(Format::of(name.as_ref()), format, "{name}");
    }
}

#[test]
fn each_format_is_written_as_documented() {
    let write = |format: Format| {
        let mut text = Vec::new();
        format.write_head(&mut text).expect("a vector");
        for plant in [
            plant(1, "Monstera", Some("indoor")),
            plant(-2, "a \"b\", c\nd", None),
            plant(3, "", Some("")),
            plant(4, " x", Some("ö;")),
        ] {
            format
                .write_plant(&mut text, plant.id, &plant.plant)
                .expect("a vector");
        }
        String::from_utf8(text).expect("UTF-8")
    };
    assert_eq!(
        write(Format::Csv),
        "id,name,tag\n1,Monstera,indoor\n-2,\"a \"\"b\"\", c\nd\",\n3,\"\",\"\"\n4,\" x\",\"ö;\"\n"
    );
    assert_eq!(
        write(Format::Ndjson),
        "{\"id\":1,\"name\":\"Monstera\",\"tag\":\"indoor\"}\n{\"id\":-2,\"name\":\"a \\\"b\\\", c\\nd\"}\n\
         {\"id\":3,\"name\":\"\",\"tag\":\"\"}\n{\"id\":4,\"name\":\" x\",\"tag\":\"ö;\"}\n"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_written_is_read_back(
        ids in prop::collection::vec(any::<i64>(), 1..4),
        name in "[\\PC\u{0}\r\n\"',;\t \u{feff}a]{0,12}",
        tag in prop::option::of("[\\PC\u{0}\r\n\"',;\t \u{feff}a]{0,12}"),
    ) {
        for format in [Format::Ndjson, Format::Csv] {
            let all: Vec<_> = ids.iter().map(|id| plant(*id, &name, tag.as_deref())).collect();
            let mut text = Vec::new();
            format.write_head(&mut text).expect("a vector");
            for plant in &all {
                format.write_plant(&mut text, plant.id, &plant.plant).expect("a vector");
            }
            prop_assert_eq!(plants(entries(format, &text)), all);
        }
    }

    #[test]
    fn no_text_makes_it_panic(text in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(&b"\"\",\n\r;{}"[..])], 0..200)) {
        for format in [Format::Ndjson, Format::Csv] {
            let text = [&b"id,name\n"[..], &text].concat();
            let mut reader = Reader::new(&text[..], format, 50, false);
            while let Ok(Some(_)) = reader.next_entry() {}
        }
    }
}

#[test]
fn files_of_spreadsheets_are_read() {
    let expected = [plant(1000, "Rose", Some("a\r\nb")), plant(2, "x", None)];
    for text in [
        "id,name,tag\n1000,Rose,\"a\r\nb\"\n2,x,\n",
        "\u{feff}id,name,tag\r\n1.0E3,Rose,\"a\r\nb\"\r\n2,x,\r\n",
        "\u{feff}\"ID\";\"Name\";\"Tag\"\r\n1e3;Rose;\"a\r\nb\"\r\n2;x;\r\n;;\r\n",
        "tag\tcolour\tname\tid\n\"a\r\nb\"\tred\tRose\t1000\n\n\tred\tx\t 2",
        "id,name,tag\n\"1000\",\"Rose\",\"a\r\nb\"\n2,\"x\",\n,,\n\n",
    ] {
        assert_eq!(plants(csv(text)), expected, "{text}");
    }
}

#[test]
fn an_empty_cell_is_none_and_a_quoted_one_is_the_empty_string() {
    let text = "id,name,tag\n1,\"\",\n2,\"\",\"\"\n";
    assert_eq!(
        plants(csv(text)),
        [plant(1, "", None), plant(2, "", Some(""))]
    );
}

#[test]
fn an_invalid_row_is_reported_with_its_line_and_the_rest_is_read() {
    let long = "x".repeat(2000);
    let text = [
        "id,name,tag\n",
        ",Rose,\n",                   // 2
        "1,,\n",                      // 3
        "x,\"a\nb\",\n",              // 4 and 5
        "1.5,a,\n",                   // 6
        "9223372036854775808,a,\n",   // 7
        "1,a, b,c\n",                 // 8
        "1,\"a\"b,\n",                // 9
        "1,a\"b,\n",                  // 10: taken as it is
        &format!("1,{long},\n"),      // 11
        &format!("1,\"{long}\n\"\n"), // 12 and 13
        "007,a,\n",                   // 14
        "2,b,\"never\n",              // 15
    ]
    .concat();
    let problems = problems(csv(&text));
    let problems: Vec<_> = problems
        .iter()
        .map(|(line, problem)| (*line, &**problem))
        .collect();
    assert_eq!(
        problems,
        [
            (2, "id: missing"),
            (3, "name: missing"),
            (4, "id: expected an integer, found text"),
            (6, "id: expected an integer, found a number with a fraction"),
            (7, "id: outside the range of int64"),
            (
                8,
                "4 cells, and the header has 3; quote a cell that contains a separator"
            ),
            (
                9,
                "a cell continues after its closing quote; write a quote within a cell twice"
            ),
            (11, "longer than 1032 bytes"),
            (
                12,
                "longer than 1032 bytes; the quote opened in line 12 may not be closed"
            ),
            (14, "id: expected an integer, found text"),
            (15, "the quote opened in line 15 is never closed"),
        ]
    );
    let invalid = csv(b"id,name\n1,\xff\n2,b\n");
    let rejection = invalid[0].plant.as_ref().expect_err("rejected");
    assert_eq!(rejection.problem, "name: invalid UTF-8");
    assert_eq!(invalid[1].plant, Ok(plant(2, "b", None)));
    assert_eq!(invalid.len(), 2);
}

#[test]
fn an_invalid_line_is_reported_with_its_number_and_the_rest_is_read() {
    let line = r#"{"id":1e3,"name":"Rose"}"#;
    let long = format!(r#"{{"id":1,"name":"{}"}}"#, "x".repeat(2000));
    let text = format!("\u{feff}{line}\r\n\n  \n{{}}\n[]\n{long}\n{{\"id\":1,\n{line}");
    let found = ndjson(&text);
    assert_eq!(
        found.first().expect("one").plant,
        Ok(plant(1000, "Rose", None))
    );
    let last = found.last().expect("one");
    assert_eq!(
        (last.text.lines.first, &last.plant),
        (8, &Ok(plant(1000, "Rose", None)))
    );
    assert_eq!(
        problems(found),
        [
            (4, "id: missing; name: missing".to_owned()),
            (5, "expected an object, found an array".to_owned()),
            (6, "longer than 1032 bytes".to_owned()),
            (7, "EOF while parsing a value at column 8".to_owned()),
        ]
    );
    assert_eq!(
        problems(ndjson(b"{\"id\":\xff}\n")),
        [(1, "invalid UTF-8 at column 7".to_owned())]
    );
}

#[test]
fn input_that_is_not_text_or_has_no_header_is_rejected_as_a_whole() {
    let rejection = |text: &[u8]| {
        let mut reader = Reader::new(text, Format::Csv, 1000, false);
        reader.next_entry().expect_err("rejected").to_string()
    };
    for (text, expected) in [
        (&b"\xff\xfei\0d\0"[..], "it is UTF-16; save it as UTF-8"),
        (b"\x1f\x8b\x08", "it is compressed; unpack it first"),
        (
            b"PK\x03\x04",
            "it is a spreadsheet or an archive; save it as CSV",
        ),
        (
            b"\nname,tag\n",
            "line 2: there is no column `id`; a CSV file starts with a header such as id,name,tag",
        ),
        (
            b"1,Rose\n",
            "line 1: there is no column `id`; a CSV file starts with a header such as id,name,tag",
        ),
        (b"id,name,ID\n", "line 1: the header has two columns `id`"),
    ] {
        assert_eq!(rejection(text), expected);
    }
}

#[test]
fn a_row_with_more_or_fewer_cells_than_the_header_is_rejected() {
    for row in [
        "1,a",
        "1",
        "1,a,b,",
        "1,a,,",
        "1,a,b,c",
        ",,,",
        ",",
        "1,\"a,b\"",
    ] {
        let found = csv(format!("id,name,tag\n{row}\n2,b,\n"));
        assert_eq!(found.len(), 2, "{row}");
        let rejection = found[0].plant.as_ref().expect_err(row);
        let cells = row.replace("\"a,b\"", "ab").split(',').count();
        let plural = if cells == 1 { "" } else { "s" };
        let expected = format!("{cells} cell{plural}, and the header has 3; ");
        assert!(rejection.problem.starts_with(&expected), "{rejection:?}");
        assert_eq!(found[1].plant, Ok(plant(2, "b", None)), "{row}");
    }
}

#[test]
fn a_stray_quote_is_reported_with_the_lines_that_it_swallows() {
    let rejected = |text: &str| {
        let mut all = csv(format!("id,name,tag\n1,a,\n{text}")).into_iter();
        assert!(all.next().expect("a plant").plant.is_ok());
        let reported = |entry: Entry| {
            let rejection = entry.plant.err()?;
            Some(format!(
                "{}: {} ({})",
                entry.text.lines, rejection.problem, rejection.lines
            ))
        };
        all.filter_map(reported).collect::<Vec<_>>()
    };
    let goes_on = "a cell continues after its closing quote; write a quote within a cell twice";
    assert_eq!(
        rejected("2,\"b,\n3,c,\n4,\"d\",\n5,e,\n"),
        [format!("lines 3-5: {goes_on} (3)")]
    );
    assert_eq!(
        rejected("2,b,\n3,\"c,\n4,d,\n5,e,\n"),
        ["lines 4-6: the quote opened in line 4 is never closed (3)"]
    );
    assert_eq!(
        rejected("2,\"b\nb\",\"c\n4,d,"),
        ["lines 3-5: the quote opened in line 4 is never closed (3)"]
    );
    assert_eq!(
        rejected("2,\"b,\n3,c,\"\n"),
        ["lines 3-4: 2 cells, and the header has 3; a cell may be empty, but not left out (2)"]
    );
    let many = "3,cccccccccc,\n".repeat(200);
    assert_eq!(
        rejected(&format!("2,\"b,\n{many}4,\"d\",\n5,e,\n")),
        ["lines 3-204: longer than 1032 bytes; the quote opened in line 3 may not be closed (202)"]
    );
    // A cell with lines of its own is one plant.
    assert_eq!(
        rejected("x,\"b\nb\",\n"),
        ["lines 3-4: id: expected an integer, found text (1)"]
    );
}

/// The header and the text of all entries, of which none is longer than a plant may be.
fn texts(format: Format, text: &str) -> String {
    let mut reader = Reader::new(text.as_bytes(), format, 100, true);
    let mut all = Vec::new();
    while let Some(entry) = reader.next_entry().expect("readable") {
        if all.is_empty() {
            all.extend_from_slice(&reader.header);
        }
        assert!(entry.text.raw.len() <= 300, "{}", entry.text.raw.len());
        all.extend(entry.text.raw);
    }
    String::from_utf8(all).expect("UTF-8")
}

#[test]
fn the_text_of_an_entry_is_kept_to_the_byte() {
    let many = "3,cccccccccc,\n".repeat(200);
    for text in [
        "id;name\r\n1;\"a\r\nb\"\r\nx;y\r\n2;c",
        "\"id\",\"na\"\"me\",name\n1,a,b,c\n2,\"b,\n3,c,\n4,\"d\",\n5,e,f\n",
        &format!("id,name,tag\n1,\"a\n{many}"),
        &format!("id,name,tag\n1,\"a\n{many}\",x\n2,b,\n"),
    ] {
        assert_eq!(texts(Format::Csv, text), text);
    }
    let long = "x".repeat(1000);
    for text in [
        "{}\r\n[1,\n{\"id\":1}",
        &format!("{{}}\n{long}\n{{}}\n"),
        &long,
    ] {
        assert_eq!(texts(Format::Ndjson, text), text);
    }
}

#[test]
fn comments_on_rejected_rows_are_skipped() {
    let comment = format!("{COMMENT}line 5: {}", "x".repeat(3000));
    let text = format!("{comment}\nid,name\n{comment}\n1,a\n\"{comment}\",\n2,b\n{comment}");
    assert_eq!(
        plants(csv(text)),
        [plant(1, "a", None), plant(2, "b", None)]
    );
    let text = format!("{comment}\n{{\"id\":1,\"name\":\"a\"}}\n{comment}\n");
    assert_eq!(plants(ndjson(text)), [plant(1, "a", None)]);
    // Another line that begins like one is not.
    assert_eq!(ndjson("# id\n").len(), 1);
    assert_eq!(plants(csv("name,id\n#1,2\n")), [plant(2, "#1", None)]);
}

#[test]
fn what_a_spreadsheet_would_evaluate_is_made_safe() {
    for (text, expected) in [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@a", "'@a"),
        ("\ta", "'\ta"),
        ("\ra", "'\ra"),
        (" =1", "' =1"),
        ("＝1", "'＝1"),
        ("Fern", "Fern"),
        ("a=1", "a=1"),
        ("", ""),
    ] {
        let safe = spreadsheet_safe(&plant(1, text, Some(text)).plant);
        assert_eq!(safe, plant(1, expected, Some(expected)).plant);
    }
}
