//! cow
