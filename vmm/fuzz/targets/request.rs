#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| stasis_vmm::fuzzing::request(bytes));
