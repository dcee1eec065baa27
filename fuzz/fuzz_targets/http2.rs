#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| plantstore::fuzzing::http2(bytes));
