# shellcheck shell=bash
# Sourced after lib.sh: Debian trees by mmdebstrap, from the mirror that this machine's own apt uses.

release=bookworm

# packages_in FILE: a package list without its comments, one line.
packages_in() {
	sed 's/#.*//' "$1" | xargs
}

# debian_versions PACKAGE...: what the release's suites offer, for a cache key: a security update makes a new image, after
# the machine's own apt-get update has seen it. Other sources on the machine do not count.
debian_versions() {
	apt-cache madison "$@" | awk -F'|' -v release="$release" 'index($3, " " release) { print $1, $2 }' | LC_ALL=C sort -u
}

# debian_tree DIR PACKAGE...: a minimal Debian with these packages, without documentation and caches. Nothing of this
# machine stays in it: neither its mirror nor its resolver.
debian_tree() {
	local dir=$1 sources temp line
	shift
	[ "$(id -u)" = 0 ] || die "a Debian tree needs root"
	sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
		'Created-By: Packages' 'Origin: Debian' 'Component: main' | grep -E " $release(-updates|-security)? main$") ||
		die "apt knows no $release main suite: run apt-get update"
	# Proxies and the like: apt inside the tree must reach the mirror the way apt outside does.
	temp=$(mktemp)
	apt-config dump --no-empty | grep -E '^Acquire::(http|https|Check|Retries|Max-)' >"$temp" || true
	say "fetching and installing Debian $release with $(echo "$@" | tr , ' ' | wc -w) named packages (1 to 2 minutes)"
	mmdebstrap --mode=root --variant=minbase --components=main --quiet \
		--include="$(echo "$@" | tr ' ' ,)" --aptopt="$temp" --aptopt='APT::Install-Recommends "false"' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
		--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/lintian/*' \
		"$release" "$dir" - <<<"$sources" 2>&1 | while IFS= read -r line; do say "mmdebstrap: $line"; done
	rm "$temp" "$dir"/etc/apt/apt.conf.d/99mmdebstrap
	: >"$dir/etc/apt/sources.list"
	rm -rf "$dir"/etc/apt/sources.list.d/* "$dir"/etc/resolv.conf "$dir"/var/lib/apt/lists/* "$dir"/var/cache/apt/*.bin \
		"$dir"/var/cache/apt/archives/*.deb "$dir"/var/cache/debconf/*-old "$dir"/var/lib/dpkg/*-old "$dir"/var/log/*.log \
		"$dir"/var/log/apt/* "$dir"/var/cache/ldconfig/aux-cache
	: >"$dir/etc/machine-id"
}

# Debian's own kernel for machines in a cloud: the rig's, and one that guests must run with as they do with ours.
debian_kernel=linux-image-6.12-cloud-amd64

# debian_kernel_into DIR: its package's vmlinuz, and modules/RELEASE with the list of their dependencies.
debian_kernel_into() {
	local package
	package=$(apt-cache depends "$debian_kernel" | awk '$1 == "Depends:" { print $2; exit }')
	say "fetching $package"
	mkdir "$1/unpacked"
	# Unpacked, not installed: an initramfs of its own making is not wanted.
	(cd "$1" && apt-get -q -o APT::Sandbox::User=root download "$package" && dpkg-deb -x "$package"_*.deb unpacked && rm "$package"_*.deb)
	mv "$1/unpacked/lib/modules" "$1/modules"
	mv "$1"/unpacked/boot/vmlinuz-* "$1/vmlinuz"
	rm -r "$1/unpacked"
}

# What a cache key of it has to hold.
debian_kernel_key() {
	key_of "=$(declare -f debian_kernel_into)" "=$(debian_versions "$debian_kernel")"
}
