//! The host's own work: an animation, rendered offscreen in several passes.

use std::sync::Arc;

use blade_graphics::{
    Buffer, BufferDesc, CommandEncoder, Context, Extent, FinishOp, InitOp, Memory, MultisampleState, PipelineContext,
    PrimitiveState, RenderPipeline, RenderPipelineDesc, RenderTarget, RenderTargetSet, ShaderBindable, ShaderBinding, ShaderData,
    ShaderDataLayout, ShaderDesc, Texture, TextureColor, TextureDesc, TextureDimension, TextureFormat, TextureSubresources,
    TextureUsage, TextureView, TextureViewDesc, ViewDimension,
};

pub const WIDTH: u32 = 128;
pub const HEIGHT: u32 = 64;
/// Passes of a frame: a gradient, and triangles in front of it.
pub const PASSES: u32 = 4;
/// Height of a triangle in pixels; it is twice as wide.
const TRIANGLE: u32 = 20;

const SHADER: &str = "
// Number of the frame, of the pass, and where its triangle begins.
var<uniform> draw: vec4<u32>;

@vertex
fn everywhere(@builtin(vertex_index) corner: u32) -> @builtin(position) vec4<f32> {
    return vec4<f32>(vec2<f32>(vec2<u32>(corner & 1u, corner >> 1u)) * 4.0 - 1.0, 0.0, 1.0);
}

@fragment
fn gradient(@builtin(position) position: vec4<f32>) -> @location(0) vec4<f32> {
    let pixel = vec2<u32>(position.xy);
    let moved = vec3<u32>(pixel.x * 2u + draw.x * 3u, pixel.y * 3u + draw.x, pixel.x ^ pixel.y);
    return vec4<f32>(vec3<f32>(moved & vec3<u32>(255u)) / 255.0, 1.0);
}

@vertex
fn triangle(@builtin(vertex_index) corner: u32) -> @builtin(position) vec4<f32> {
    let size = 20u;
    let down = select(0u, size, corner > 0u);
    let right = select(0u, size * 2u, corner > 1u);
    let at = vec2<f32>(draw.zw + vec2<u32>(right, down)) / vec2<f32>(128.0, 64.0);
    return vec4<f32>(at.x * 2.0 - 1.0, 1.0 - at.y * 2.0, 0.0, 1.0);
}

@fragment
fn flat() -> @location(0) vec4<f32> {
    return vec4<f32>(vec3<f32>(vec3<u32>(draw.y * 60u, 255u, draw.x & 255u)) / 255.0, 1.0);
}
";

/// The uniform of a pass.
struct Draw([u32; 4]);

impl ShaderData for Draw {
    fn layout() -> ShaderDataLayout {
        ShaderDataLayout { bindings: vec![("draw", ShaderBinding::Plain { size: 16 })] }
    }

    fn fill(&self, mut context: PipelineContext) {
        self.0.bind_to(&mut context, 0);
    }
}

/// Where the triangle of a pass begins, in pixels.
fn corner(frame: u32, pass: u32) -> [u32; 2] {
    [(frame * 5 + pass * 17) % (WIDTH - 2 * TRIANGLE), pass * 11]
}

/// Draws frames into a texture and keeps the last one in memory that the host can read.
pub struct Renderer {
    context: Arc<Context>,
    gradient: RenderPipeline,
    triangle: RenderPipeline,
    texture: Texture,
    view: TextureView,
    pixels: Buffer,
}

impl Renderer {
    pub fn new(context: &Arc<Context>) -> Self {
        let shader = context.create_shader(ShaderDesc { source: SHADER, naga_module: None });
        let format = TextureFormat::Rgba8Unorm;
        let pipeline = |vertex: &str, fragment: &str| {
            context.create_render_pipeline(RenderPipelineDesc {
                name: fragment,
                data_layouts: &[&Draw::layout()],
                vertex: shader.at(vertex),
                vertex_fetches: &[],
                primitive: PrimitiveState::default(),
                depth_stencil: None,
                fragment: Some(shader.at(fragment)),
                color_targets: &[format.into()],
                multisample_state: MultisampleState::default(),
            })
        };
        let texture = context.create_texture(TextureDesc {
            name: "frame",
            format,
            size: Extent { width: WIDTH, height: HEIGHT, depth: 1 },
            array_layer_count: 1,
            mip_level_count: 1,
            sample_count: 1,
            dimension: TextureDimension::D2,
            usage: TextureUsage::TARGET | TextureUsage::COPY,
            external: None,
        });
        let subresources = &TextureSubresources::default();
        let view = TextureViewDesc { name: "frame", format, dimension: ViewDimension::D2, subresources };
        let size = u64::from(WIDTH * HEIGHT * 4);
        Renderer {
            context: context.clone(),
            gradient: pipeline("everywhere", "gradient"),
            triangle: pipeline("triangle", "flat"),
            view: context.create_texture_view(texture, view),
            texture,
            pixels: context.create_buffer(BufferDesc { name: "pixels", size, memory: Memory::Download }),
        }
    }

    /// Records what the first frame needs.
    pub fn prepare(&self, encoder: &mut CommandEncoder) {
        encoder.init_texture(self.texture);
    }

    /// Records a pass of a frame. The encoder has manual barriers: this one orders the pass after those before.
    pub fn draw(&self, encoder: &mut CommandEncoder, frame: u32, pass: u32) {
        let init_op = if pass == 0 { InitOp::Clear(TextureColor::OpaqueBlack) } else { InitOp::Load };
        let pipeline = if pass == 0 { &self.gradient } else { &self.triangle };
        let [left, top] = corner(frame, pass);
        encoder.barrier();
        let target = RenderTarget { view: self.view, init_op, finish_op: FinishOp::Store };
        let mut render = encoder.render("host", RenderTargetSet { colors: &[target], depth_stencil: None });
        let mut drawing = render.with(pipeline);
        drawing.bind(0, &Draw([frame, pass, left, top]));
        drawing.draw(0, 3, 0, 1);
    }

    /// Records the copy of the frame to where [`Renderer::pixels`] finds it.
    pub fn keep(&self, encoder: &mut CommandEncoder) {
        encoder.barrier();
        let size = Extent { width: WIDTH, height: HEIGHT, depth: 1 };
        encoder.transfer("keep").copy_texture_to_buffer(self.texture.into(), self.pixels.into(), WIDTH * 4, size);
    }

    /// The frame that was kept last, row by row, as RGBA. The device is done with it.
    pub fn pixels(&self) -> Vec<[u8; 4]> {
        // SAFETY: the buffer is mapped, holds this many pixels of 4 bytes, and nothing writes to it now.
        unsafe { std::slice::from_raw_parts(self.pixels.data().cast::<[u8; 4]>(), (WIDTH * HEIGHT) as usize) }.to_vec()
    }
}

impl Drop for Renderer {
    fn drop(&mut self) {
        self.context.destroy_render_pipeline(&mut self.gradient);
        self.context.destroy_render_pipeline(&mut self.triangle);
        self.context.destroy_texture_view(self.view);
        self.context.destroy_texture(self.texture);
        self.context.destroy_buffer(self.pixels);
    }
}

/// What a frame must look like, from integers alone.
pub fn expected(frame: u32) -> Vec<[u8; 4]> {
    let pixel = |x: u32, y: u32| {
        // No centre of a pixel lies on an edge: the long one runs two pixels to the right for each one down.
        let covers = |pass: &u32| {
            let [left, top] = corner(frame, *pass);
            x >= left && y >= top && y - top < TRIANGLE && x - left <= 2 * (y - top)
        };
        match (1..PASSES).rev().find(covers) {
            Some(pass) => [(pass * 60) as u8, 255, frame as u8, 255],
            None => [(x * 2 + frame * 3) as u8, (y * 3 + frame) as u8, (x ^ y) as u8, 255],
        }
    };
    (0..HEIGHT).flat_map(|y| (0..WIDTH).map(move |x| (x, y))).map(|(x, y)| pixel(x, y)).collect()
}
