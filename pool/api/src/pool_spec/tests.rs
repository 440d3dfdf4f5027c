use super::*;
use crate::TemplateSpec;

fn parse(pool: &str) -> Result<PoolSpec, SpecError> {
    TemplateSpec::parse(&format!("name='x'\ncommand='y'\n[pool]\n{pool}")).map(|spec| spec.pool)
}

#[test]
fn all_of_it_is_understood_and_comes_back() {
    let text = "min=2\nmax=9\nhot=1\nbuffer=3\nmax_memory='1GiB'\nscale_to_zero_after='5m'\nweight=300\nconcurrency=64\n\
                [[pool.schedule]]\ndays=['mon','fri']\nfrom='08:00'\nto='18:30'\nmin=5";
    let spec = parse(text).unwrap();
    assert_eq!((spec.min, spec.max, spec.hot, spec.buffer, spec.weight), (2, 9, 1, 3, 300));
    assert_eq!((spec.max_memory, spec.concurrency), (Some(ByteSize::gib(1)), Some(64)));
    assert_eq!(spec.scale_to_zero_after, Some(Duration::from_secs(300)));
    let window = &spec.schedule[0];
    assert_eq!((&window.days[..], window.min), (&[Day::Mon, Day::Fri][..], 5));
    assert_eq!((window.from.minutes(), window.to.minutes()), (480, 18 * 60 + 30));
    let stored = serde_json::to_string(&spec).unwrap();
    assert_eq!(serde_json::from_str::<PoolSpec>(&stored).unwrap(), spec);
}

#[test]
fn what_is_impossible_is_refused_with_its_line_and_what_would_be_possible() {
    let window = |more: &str| format!("max=4\n[[pool.schedule]]\n{more}");
    let cases = [
        ("min=5\nmax=4".to_owned(), "line 4: pool.min is 5", "at most pool.max, which is 4"),
        ("min=33".into(), "line 4: pool.min is 33", "at most pool.max, which is 32"),
        ("max=0".into(), "line 4: pool.max is 0", "1 to 1000"),
        ("max=2\nmin=1\nhot=3".into(), "line 6: pool.hot is 3", "at most pool.max"),
        ("max=2\nmin=1\nbuffer=3".into(), "line 6: pool.buffer is 3", "at most pool.max"),
        ("weight=0".into(), "line 4: pool.weight is 0", "1 to 1000"),
        ("concurrency=0".into(), "line 4: pool.concurrency is 0", "leave it out for no limit"),
        (
            "max_memory='255MiB'".into(),
            "line 4: pool.max_memory is 255.0 MiB",
            "enough for one VM, which has 256.0 MiB",
        ),
        ("max_memory='1000MB'".into(), "line 4: pool.max_memory", "whole MiB"),
        ("max_memory=9".into(), "line 4", "enough for one VM"),
        ("max_memory='9 pages'".into(), "line 4", "a size with its unit, such as 64MiB or 2GiB"),
        ("max_memory=-1".into(), "line 4", "a size with its unit"),
        ("max_memory=true".into(), "line 4", "a size with its unit"),
        ("min=-1".into(), "line 4", "a whole number, 0 to 1000, and at most pool.max"),
        ("max=5000000000".into(), "line 4", "a whole number, 1 to 1000"),
        ("max=2.5".into(), "line 4", "a whole number, 1 to 1000"),
        ("hot='one'".into(), "line 4", "a whole number, 0 to 1000"),
        ("min=1\nbuffer=-1".into(), "line 5", "a whole number, 0 to 1000"),
        ("weight=-1".into(), "line 4", "a whole number, 1 to 1000"),
        ("concurrency=-1".into(), "line 4", "a whole number, 1 to 100000"),
        ("concurrency=100001".into(), "line 4: pool.concurrency is 100001", "1 to 100000"),
        (
            "scale_to_zero_after='500ms'".into(),
            "line 4: pool.scale_to_zero_after is 500ms",
            "1s to 30days, or 0s for never",
        ),
        ("scale_to_zero_after='5 parsecs'".into(), "line 4", "a time with its unit, such as 500ms, 5s, 2m or 1h"),
        ("scale_to_zero_after=5".into(), "line 4", "a time with its unit"),
        ("size=4".into(), "line 4", "`min`, `max`, `hot`"),
        (window("days=[]\nfrom='08:00'\nto='09:00'\nmin=1"), "line 6: pool.schedule.days is empty", "mon, tue"),
        (window("days=['mon']\nfrom='08:00'\nto='08:00'\nmin=1"), "line 8: pool.schedule.to is 08:00", "another time"),
        (window("days=['mon']\nfrom='08:00'\nto='09:00'\nmin=5"), "line 9: pool.schedule.min is 5", "which is 4"),
        (window("days=['mon']\nfrom='24:00'\nto='09:00'\nmin=1"), "line 7", "00:00 to 23:59"),
        (window("days=['monday']\nfrom='08:00'\nto='09:00'\nmin=1"), "line 6", "`mon`, `tue`"),
        (window("days=['mon']\nfrom='08:00'\nto='09:00'\nmin=1\nmax=3"), "line 10", "unknown field `max`"),
        (window("days=['mon']\nfrom='08:00'\nto='09:00'\nmin=-1"), "line 9", "a whole number, 0 to 1000"),
        (window("days='mon'\nfrom='08:00'\nto='09:00'\nmin=1"), "line 6", "expected a sequence"),
        (window("days=['mon']\nfrom='08:00'\nmin=1"), "line 5", "missing field `to`"),
    ];
    for (pool, place, allowed) in cases {
        let refused = parse(&pool).unwrap_err().to_string();
        assert!(refused.starts_with("template.toml"), "{refused}");
        assert!(
            refused.contains(place) && refused.contains(allowed),
            "{pool}\n→ {refused}\nlacks {place:?} or {allowed:?}"
        );
    }
}

#[test]
fn times_of_day_have_two_digits_each() {
    for good in ["00:00", "23:59", "08:05"] {
        assert_eq!(good.parse::<TimeOfDay>().unwrap().to_string(), good);
    }
    for bad in ["", "8:00", "08:0", "24:00", "12:60", "12", "-1:00", "+8:00", "12:00:00", "1２:00"] {
        assert!(bad.parse::<TimeOfDay>().is_err(), "{bad}");
    }
}

#[test]
fn a_patch_changes_what_it_names() {
    let spec = parse("min=2\nmax=9\nmax_memory='1GiB'").unwrap();
    let patch: PoolPatch =
        serde_json::from_str(r#"{"hot": 1, "max_memory": "0B", "scale_to_zero_after": "90s"}"#).unwrap();
    let changed = patch.on(&spec);
    assert_eq!((changed.min, changed.max, changed.hot, changed.max_memory), (2, 9, 1, None));
    assert_eq!(changed.scale_to_zero_after, Some(Duration::from_secs(90)));
    let both = patch.then(&PoolPatch { hot: Some(2), min: Some(1), ..PoolPatch::default() });
    assert_eq!((both.hot, both.min, both.scale_to_zero_after), (Some(2), Some(1), Some(Duration::from_secs(90))));
    assert!(serde_json::from_str::<PoolPatch>(r#"{"size": 1}"#).is_err());
}

#[test]
fn a_patch_of_schedule_and_concurrency_is_checked_as_the_file_is() {
    let spec = parse("max=9\nconcurrency=8\n[[pool.schedule]]\ndays=['mon']\nfrom='08:00'\nto='09:00'\nmin=5").unwrap();
    let patch = |text: &str| serde_json::from_str::<PoolPatch>(text);
    let set = |text: &str| patch(text).unwrap().checked_on(&spec, ByteSize::mib(256));
    let window = |days: &str, to: &str, min: u32| {
        format!(r#"{{"schedule": [{{"days": {days}, "from": "08:00", "to": "{to}", "min": {min}}}]}}"#)
    };
    let changed = set(&window(r#"["tue", "sun"]"#, "07:00", 9)).unwrap();
    assert_eq!((changed.schedule[0].to_string().as_str(), changed.concurrency), ("tue,sun/08:00-07:00/9", Some(8)));
    assert_eq!(set(r#"{"schedule": []}"#).unwrap().schedule, []);
    assert_eq!(set(r#"{"min": 1}"#).unwrap().schedule, spec.schedule, "what is not given stays");
    assert_eq!(set(r#"{"concurrency": 3}"#).unwrap().concurrency, Some(3));
    assert_eq!(set(r#"{"concurrency": 0}"#).unwrap().concurrency, Some(8), "the template's holds again");
    let refused = |text: &str| match patch(text) {
        Ok(_) => set(text).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    for (text, why) in [
        (window("[]", "09:00", 1), "at least one of mon, tue, wed, thu, fri, sat, sun"),
        (window(r#"["monday"]"#, "09:00", 1), "`mon`, `tue`"),
        (window(r#"["mon"]"#, "08:00", 1), "another time than pool.schedule.from"),
        (window(r#"["mon"]"#, "24:00", 1), "00:00 to 23:59"),
        (window(r#"["mon"]"#, "09:00", 10), "at most pool.max, which is 9"),
        (r#"{"concurrency": 9}"#.into(), "1 to 8, which the template allows for all tenants together"),
        (r#"{"concurrency": 100001}"#.into(), "1 to 100000"),
    ] {
        let refused = refused(&text);
        assert!(refused.contains(why), "{text}: {refused}");
    }
    let both = patch(r#"{"concurrency": 3}"#).unwrap().then(&patch(r#"{"schedule": []}"#).unwrap());
    assert_eq!((both.concurrency, both.schedule), (Some(3), Some(vec![])));
}
