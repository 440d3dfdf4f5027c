use super::*;

#[test]
fn two_lines_suffice() {
    let spec = TemplateSpec::parse("name = 'x'\ncommand = 'python3 main.py'").unwrap();
    assert_eq!((spec.port, spec.memory_mib(), spec.pool.min, spec.cpu), (8080, 256, 4, 1));
    assert_eq!(spec.devices, DevicesSpec::default());
}

#[test]
fn sizes_and_times_carry_their_units() {
    let text = "name='x'\ncommand='y'\nmemory='512MiB'\nready_timeout='90s'\n[pool]\nmin=2\nmax=9\n[env]\nA='b'";
    let spec = TemplateSpec::parse(text).unwrap();
    assert_eq!(spec.memory_mib(), 512);
    assert_eq!(spec.ready_timeout, Duration::from_secs(90));
    assert_eq!(spec.pool, PoolSpec { min: 2, max: 9, ..PoolSpec::default() });
}

#[test]
fn what_is_stored_comes_back() {
    let spec = TemplateSpec::parse("name='x'\ncommand='y'\nmemory='1100MiB'\ndisk='2049MiB'").unwrap();
    let stored = serde_json::to_string(&spec).unwrap();
    assert_eq!(serde_json::from_str::<TemplateSpec>(&stored).unwrap(), spec);
}

#[test]
fn each_bad_field_is_named() {
    let cases = [
        ("command=' '", "command"),
        ("command='y'\nport=0", "port"),
        ("command='y'\nready='x'", "ready"),
        ("command='y'\nready_timeout='0s'", "ready_timeout"),
        ("command='y'\ncpu=0", "cpu"),
        ("command='y'\nmemory='1MiB'", "memory"),
        ("command='y'\nmemory='99GiB'", "memory"),
        ("command='y'\n[pool]\nmin=5\nmax=4", "pool.min"),
        ("command='y'\n[env]\n'A=B'='x'", "env"),
        ("command='y'\n[env]\nPORT='1'", "env.PORT"),
        ("command='y'\n[devices]\nballoon=true\n[snapshot]\nmemory='compressed'", "devices.balloon"),
    ];
    for (text, wanted) in cases {
        match TemplateSpec::parse(&format!("name='x'\n{text}")) {
            Err(SpecError::OutOfBounds { field, .. }) => assert_eq!(field, wanted),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert!(matches!(TemplateSpec::parse("name='x'\ncommand='y'\nmemry='1MiB'"), Err(SpecError::Toml(_))));
    assert!(TemplateSpec::parse("name='X'\ncommand='y'").is_err());
}

#[test]
fn whatever_is_wrong_is_refused_with_its_line_and_what_is_allowed() {
    let cases = [
        ("memry='1MiB'", "line 3", "expected one of `name`, `base`, `command`"),
        ("port=0", "line 3: port is 0", "1 to 65535"),
        ("port=70000", "line 3", "a whole number, 1 to 65535"),
        ("port=-1", "line 3", "a whole number, 1 to 65535"),
        ("port='http'", "line 3", "a whole number, 1 to 65535"),
        ("cpu=33", "line 3: cpu is 33", "1 to 32"),
        ("cpu=300", "line 3", "a whole number, 1 to 32"),
        ("cpu=1.5", "line 3", "a whole number, 1 to 32"),
        ("ready='x'", "line 3: ready is x", "begins with /"),
        ("ready_timeout='0s'", "line 3: ready_timeout is 0ns", "1s to 1h"),
        ("ready_timeout='5 parsecs'", "line 3", "a time with its unit, such as 500ms, 5s, 2m or 1h"),
        ("ready_timeout=5", "line 3", "a time with its unit"),
        ("timeout='2h'", "line 3: timeout is 7200s", "1s to 1h"),
        ("timeout='5MiB'", "line 3", "a time with its unit"),
        ("memory='1MiB'", "line 3: memory is 1.0 MiB", "64MiB to 3GiB, in whole MiB"),
        ("memory='512 parsecs'", "line 3", "a size with its unit, such as 64MiB or 2GiB"),
        ("memory='5s'", "line 3", "a size with its unit"),
        ("memory=512", "line 3: memory is 512 B", "64MiB to 3GiB"),
        ("memory=-1", "line 3", "a size with its unit"),
        ("disk='2TiB'", "line 3: disk is 2.0 TiB", "64MiB to 1TiB, in whole MiB"),
        ("disk='2 plates'", "line 3", "a size with its unit"),
        ("base='../x'", "line 3: base is ../x", "a plain name"),
        ("\n[env]\n'A=B'='x'", "line 4: env is", "names of letters, digits and _"),
        ("[env]\nPORT='1'", "line 4: env.PORT is set", "left out"),
        ("[env]\nA=1", "line 4", "expected a string"),
        ("[devices]\nrng='yes'", "line 4", "expected a boolean"),
        ("[devices]\ngpu=true", "line 4", "`rng` or `balloon`"),
        ("[devices]\nballoon=true\n[snapshot]\nmemory='compressed'", "line 4: devices.balloon is true", "false where"),
        ("[snapshot]\nmemory='zip'", "line 4", "`raw` or `compressed`"),
        ("[pools]\nmin=1", "line 3", "`pool`"),
        ("cpu=", "line 3", ""),
    ];
    for (text, place, allowed) in cases {
        let refused = TemplateSpec::parse(&format!("name='x'\ncommand='y'\n{text}")).unwrap_err().to_string();
        assert!(refused.starts_with("template.toml"), "{text}: {refused}");
        assert!(refused.contains(place), "{text} does not say {place:?}: {refused}");
        assert!(refused.contains(allowed), "{text} does not say {allowed:?}: {refused}");
    }
    for (text, place, allowed) in [
        ("name='X'\ncommand='y'", "line 1", "1 to 63 lower-case letters, digits and inner hyphens"),
        ("name='x'\ncommand=' '", "line 2: command is", "1 to 4096 bytes without NUL"),
        ("name='x'", "line 1", "missing field `command`"),
    ] {
        let refused = TemplateSpec::parse(text).unwrap_err().to_string();
        assert!(refused.contains(place) && refused.contains(allowed), "{text}: {refused}");
    }
}

#[test]
fn memory_is_raw_unless_it_is_to_be_compressed() {
    let parse = |rest: &str| TemplateSpec::parse(&format!("name='x'\ncommand='y'\n{rest}"));
    assert_eq!(parse("").unwrap().snapshot.memory, MemoryForm::Raw);
    assert_eq!(parse("[snapshot]\nmemory='raw'").unwrap().snapshot.memory, MemoryForm::Raw);
    assert_eq!(parse("[snapshot]\nmemory='compressed'").unwrap().snapshot.memory, MemoryForm::Compressed);
    let refused = parse("[snapshot]\nmemory='zip'").unwrap_err().to_string();
    assert!(refused.contains("line 4") && refused.contains("`raw` or `compressed`"), "{refused}");
    assert!(parse("[snapshot]\npages='4k'").is_err());
}
