//! The gateway over real sockets, before a node whose VMs are tasks at the other end of a pipe.

#[cfg(test)]
mod api;
#[cfg(test)]
mod failures;
#[cfg(test)]
mod leaving;
#[cfg(test)]
mod malformed;
#[cfg(test)]
mod observed;
#[cfg(test)]
mod pass_through;
#[cfg(test)]
mod raw_http;
#[cfg(test)]
mod sandboxes;
#[cfg(test)]
mod support;
#[cfg(test)]
mod tenants;
