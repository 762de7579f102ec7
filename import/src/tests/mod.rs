mod artifact;
mod corpus;
mod external;
mod specialize;
mod structure;
mod wire;
