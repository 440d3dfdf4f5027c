//! Users and groups, as `/etc/passwd` and `/etc/group` have them.
//!
//! Read by ourselves: the agent is a static binary, and its C library's own look-up would load shared objects.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Who a request is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups, the own one first.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: PathBuf,
}

/// All users and groups.
#[derive(Debug, Default)]
pub(crate) struct Users {
    users: Vec<User>,
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    name: String,
    gid: u32,
    members: Vec<String>,
}

impl Users {
    /// From two files; one that cannot be read names nobody.
    pub(crate) fn read(passwd: &Path, group: &Path) -> Self {
        let text = |path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        Self::parse(&text(passwd), &text(group))
    }

    fn parse(passwd: &str, group: &str) -> Self {
        let groups: Vec<Group> = group.lines().filter_map(parse_group).collect();
        let users = passwd.lines().filter_map(|line| parse_user(line, &groups)).collect();
        Self { users, groups }
    }

    pub(crate) fn named(&self, name: &str) -> Option<User> {
        self.users.iter().find(|user| user.name == name).cloned()
    }

    /// The name of a user, or the number where none has it.
    pub(crate) fn user_name(&self, uid: u32) -> String {
        self.users.iter().find(|user| user.uid == uid).map_or_else(|| uid.to_string(), |user| user.name.clone())
    }

    /// The name of a group, or the number where none has it.
    pub(crate) fn group_name(&self, gid: u32) -> String {
        self.groups.iter().find(|group| group.gid == gid).map_or_else(|| gid.to_string(), |group| group.name.clone())
    }
}

/// `name:x:uid:gid:comment:home:shell`
fn parse_user(line: &str, groups: &[Group]) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?.to_owned();
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1).filter(|home| home.starts_with('/')).unwrap_or("/").into();
    let mut all = vec![gid];
    for group in groups {
        if group.members.contains(&name) && !all.contains(&group.gid) {
            all.push(group.gid);
        }
    }
    Some(User { name, uid, gid, groups: all, home })
}

/// `name:x:gid:member,member`
fn parse_group(line: &str) -> Option<Group> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?.to_owned();
    let gid = fields.nth(1)?.parse().ok()?;
    let members = fields.next().unwrap_or_default().split(',').filter(|name| !name.is_empty()).map(str::to_owned);
    Some(Group { name, gid, members: members.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n# nobody\n\nuser:x:1000:1000:,,,:/home/user:/bin/bash\nbroken:x:one:1\nbare:x:7:8\nodd:x:9:9::relative:";
    const GROUP: &str = "root:x:0:\nuser:x:1000:user\nsudo:x:27:user,admin\nodd\n";

    #[test]
    fn users_have_their_groups_and_homes() {
        let users = Users::parse(PASSWD, GROUP);
        let user = users.named("user").unwrap();
        assert_eq!(
            (user.uid, user.gid, user.groups.as_slice(), user.home.as_path()),
            (1000, 1000, [1000, 27].as_slice(), Path::new("/home/user"))
        );
        assert_eq!(users.named("bare").unwrap().home, Path::new("/"));
        assert_eq!(users.named("odd").unwrap().home, Path::new("/"));
        for nobody in ["", "broken", "# nobody", "admin", "user:x"] {
            assert_eq!(users.named(nobody), None, "{nobody:?}");
        }
    }

    #[test]
    fn ids_without_a_name_are_shown_as_numbers() {
        let users = Users::parse(PASSWD, GROUP);
        assert_eq!((users.user_name(1000).as_str(), users.user_name(4711).as_str()), ("user", "4711"));
        assert_eq!((users.group_name(27).as_str(), users.group_name(4711).as_str()), ("sudo", "4711"));
    }

    #[test]
    fn a_missing_database_names_nobody() {
        assert_eq!(Users::read(Path::new("/nonexistent"), Path::new("/nonexistent")).named("root"), None);
    }
}
