use bytesize::ByteSize;
use proptest::prelude::*;

use super::*;

/// Wednesday, 1 July 2026, 10:00 UTC.
const WEDNESDAY: u64 = 1_782_900_000;
const HOUR: u64 = 3600;

fn settings(text: &str) -> PoolSpec {
    stasis_pool_api::TemplateSpec::parse(&format!("name='x'\ncommand='y'\nmemory='64MiB'\n[pool]\n{text}"))
        .unwrap()
        .pool
}

fn moment(utc: u64) -> Moment {
    Moment { utc, idle: Duration::ZERO, in_use: 0, vm_mib: 72, is_begun_by_claim: false }
}

#[test]
fn a_table_of_settings_and_moments() {
    let at = moment(WEDNESDAY);
    let used = |in_use| Moment { in_use, ..at };
    let idle = |seconds| Moment { idle: Duration::from_secs(seconds), ..at };
    let office = "max=9\nmin=1\n[[pool.schedule]]\ndays=['mon','tue','wed']\nfrom='09:00'\nto='18:00'\nmin=5";
    let night = "max=9\nmin=1\n[[pool.schedule]]\ndays=['tue']\nfrom='22:00'\nto='06:00'\nmin=5";
    let at_hour = |hour: u64| moment(WEDNESDAY - 10 * HOUR + hour * HOUR);
    // Settings, moment → ready, hot, bound by, seconds that it holds.
    let table = [
        ("min=4", at, 4, 0, None, None),
        ("min=4\nhot=2", at, 4, 2, None, None),
        ("min=1\nhot=3", at, 3, 3, None, None),
        // The buffer is for pools that are in use.
        ("min=1\nbuffer=3", at, 1, 0, None, None),
        ("min=1\nbuffer=3", used(1), 3, 0, None, None),
        // What is in use leaves less.
        ("min=4\nmax=6", used(4), 2, 0, Some(BoundBy::Max), None),
        ("min=4\nmax=6\nhot=4", used(5), 1, 1, Some(BoundBy::Max), None),
        ("min=4\nmax=6", used(9), 0, 0, Some(BoundBy::Max), None),
        ("min=4\nmax_memory='220MiB'", at, 3, 0, Some(BoundBy::MaxMemory), None),
        ("min=4\nmax_memory='220MiB'", used(2), 1, 0, Some(BoundBy::MaxMemory), None),
        // Scale to zero.
        ("min=4\nscale_to_zero_after='60s'", idle(59), 4, 0, None, Some(1)),
        ("min=4\nscale_to_zero_after='60s'", idle(60), 0, 0, Some(BoundBy::Idle), None),
        ("min=4\nscale_to_zero_after='60s'", used(1), 4, 0, None, None),
        ("min=4\nhot=1\nscale_to_zero_after='60s'", idle(61), 0, 0, Some(BoundBy::Idle), None),
        ("min=4", idle(1_000_000), 4, 0, None, None),
        // Pools that a claim began end by themselves.
        ("min=4", Moment { is_begun_by_claim: true, ..idle(599) }, 4, 0, None, Some(1)),
        ("min=4", Moment { is_begun_by_claim: true, ..idle(600) }, 0, 0, Some(BoundBy::Idle), None),
        ("min=4\nscale_to_zero_after='0s'", Moment { is_begun_by_claim: true, ..idle(9999) }, 4, 0, None, None),
        // Windows.
        (office, at_hour(8), 1, 0, None, Some(HOUR)),
        (office, at_hour(9), 5, 0, None, Some(9 * HOUR)),
        (office, at_hour(17), 5, 0, None, Some(HOUR)),
        (office, at_hour(18), 1, 0, None, Some(4 * DAY + 15 * HOUR)),
        (night, at_hour(5), 5, 0, None, Some(HOUR)),
        (night, at_hour(6), 1, 0, None, Some(5 * DAY + 40 * HOUR)),
        (night, moment(WEDNESDAY - 11 * HOUR), 5, 0, None, Some(7 * HOUR)),
    ];
    for (text, now, ready, hot, bound_by, seconds) in table {
        let got = target(&settings(text), now);
        let wanted = (ready, hot, bound_by, seconds.map(Duration::from_secs));
        assert_eq!((got.ready, got.hot, got.bound_by, got.holds_for), wanted, "{text}\nat {now:?}");
    }
    // An open window keeps the pool from being scaled to zero.
    let both = settings(&office.replace("min=1\n", "min=1\nscale_to_zero_after='60s'\n"));
    let long_idle = |now: Moment| target(&both, Moment { idle: Duration::from_secs(99), ..now }).ready;
    assert_eq!((long_idle(at_hour(10)), long_idle(at_hour(20))), (5, 0));
}

fn windows() -> impl Strategy<Value = Vec<Window>> {
    let days = [Day::Mon, Day::Tue, Day::Wed, Day::Thu, Day::Fri, Day::Sat, Day::Sun];
    let time = || (0..24u16, 0..60u16).prop_map(|(hour, minute)| format!("{hour:02}:{minute:02}").parse().unwrap());
    let window = (proptest::sample::subsequence(days.to_vec(), 1..=7), time(), time(), 0..40u32)
        .prop_map(|(days, from, to, min)| Window { days, from, to, min })
        .prop_filter("a window has a length", |window| window.from != window.to);
    proptest::collection::vec(window, 0..4)
}

prop_compose! {
    fn any_settings()(
        max in 1..40u32, min in 0..40u32, hot in 0..40u32, buffer in 0..40u32, schedule in windows(),
        memory in proptest::option::of(72..4000u64), idle in proptest::option::of(0..1000u64),
    ) -> PoolSpec {
        let schedule = schedule.into_iter().map(|window| Window { min: window.min.min(max), ..window }).collect();
        PoolSpec {
            max, min: min.min(max), hot: hot.min(max), buffer: buffer.min(max), schedule,
            max_memory: memory.map(ByteSize::mib),
            scale_to_zero_after: idle.map(Duration::from_secs),
            ..PoolSpec::default()
        }
    }
}

prop_compose! {
    fn any_moment()(utc in 1_700_000_000..1_800_000_000u64, idle in 0..2000u64, in_use in 0..50u32, begun in any::<bool>()) -> Moment {
        let idle = if in_use > 0 { Duration::ZERO } else { Duration::from_secs(idle) };
        Moment { utc, idle, in_use, vm_mib: 72, is_begun_by_claim: begun }
    }
}

proptest! {
    #[test]
    fn limits_are_kept_whatever_is_asked_for(settings in any_settings(), now in any_moment()) {
        let got = target(&settings, now);
        prop_assert!(got.hot <= got.ready);
        prop_assert!(got.ready == 0 || got.ready + now.in_use <= settings.max);
        if let Some(most) = settings.max_memory {
            prop_assert!(got.ready == 0 || u64::from(got.ready + now.in_use) * 72 <= most.as_u64() >> 20);
        }
        // More in use never makes it want more beyond the buffer.
        let more = target(&settings, Moment { in_use: now.in_use + 1, idle: Duration::ZERO, ..now });
        prop_assert!(now.in_use == 0 || more.ready <= got.ready);
    }

    #[test]
    fn nothing_changes_before_it_says_so(settings in any_settings(), now in any_moment(), percent in 0..100u64) {
        let got = target(&settings, now);
        let held = got.holds_for.unwrap_or(Duration::from_secs(2 * WEEK)).as_secs();
        prop_assert!(held > 0);
        let later = (held - 1) * percent / 100;
        let then = Moment {
            utc: now.utc + later,
            idle: if now.in_use > 0 { Duration::ZERO } else { now.idle + Duration::from_secs(later) },
            ..now
        };
        let same = target(&settings, then);
        prop_assert_eq!((same.ready, same.hot, same.bound_by), (got.ready, got.hot, got.bound_by), "{} s later", later);
    }
}
