mod artifact;
mod corpus;
mod dequantize;
mod external;
mod specialize;
mod structure;
mod wire;
